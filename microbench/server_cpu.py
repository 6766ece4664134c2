# SPDX-License-Identifier: Apache-2.0
"""CPU time of a server: of all its processes, and of each of their threads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

from kvtax.records.requests import CpuReading

NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name (proc_pid_stat(5)).
PARENT, CHILDREN_USER, CHILDREN_SYSTEM = 1, 13, 14


def read_cpu(supervisor: int) -> CpuReading:
    """Read the CPU time of the processes below `supervisor`.

    That of a process has its threads that ended, to the nanosecond, and its children
    that ended, in ticks of 10 ms. The supervisor waits for orphans.
    """
    processes = _processes()
    known = processes.get(supervisor)
    total_ns, threads = known.ended_children_ns if known else 0, dict[int, int]()
    for pid in _below(supervisor, processes):
        with suppress(OSError):
            # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)
            total_ns += processes[pid].ended_children_ns
            threads |= _threads_ns(pid)
    return CpuReading(time.perf_counter_ns(), total_ns, threads)


class _Process(NamedTuple):
    parent: int
    ended_children_ns: int


def _processes() -> dict[int, _Process]:
    """Read all processes of the machine, ended ones too for which nobody waited."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
                ticks = int(fields[CHILDREN_USER]) + int(fields[CHILDREN_SYSTEM])
                found[int(name)] = _Process(int(fields[PARENT]), ticks * NS_PER_TICK)
    return found


def _below(root: int, processes: dict[int, _Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _threads_ns(pid: int) -> dict[int, int]:
    """Read how long each thread ran (Linux, Documentation/scheduler/sched-stats)."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            text = _read(f"/proc/{pid}/task/{thread}/schedstat")
            if ns := int(text.partition(b" ")[0]):
                found[int(thread)] = ns
    return found


def _read(path: str) -> bytes:
    """Read a small file; a server has hundreds, and a hold waits for them."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1_024)
    finally:
        os.close(file)
