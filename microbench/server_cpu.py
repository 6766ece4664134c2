# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of a server: of all its processes, and of their threads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

from kvtax.records.requests import CpuReading

KIB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") // 1_024
NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name (proc_pid_stat(5)).
PARENT, CHILDREN_USER, CHILDREN_SYSTEM = 1, 13, 14


def read_cpu(supervisor: int) -> CpuReading:
    """Read the CPU time and the memory of the processes below `supervisor`.

    That of a process has its threads that ended, to the nanosecond, and its children
    that ended, in ticks of 10 ms. The supervisor waits for orphans.
    """
    processes = _processes()
    known = processes.get(supervisor)
    total_ns, anonymous_pages = known.ended_children_ns if known else 0, 0
    ran_ns, waited_ns = dict[int, int](), dict[int, int]()
    for pid in _below(supervisor, processes):
        with suppress(OSError):
            # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)
            total_ns += processes[pid].ended_children_ns
            _add_threads(pid, ran_ns, waited_ns)
            _, resident, of_files, *_ = map(int, _read(f"/proc/{pid}/statm").split())
            anonymous_pages += resident - of_files
    return CpuReading(
        time.perf_counter_ns(),
        total_ns,
        ran_ns,
        anonymous_kib=anonymous_pages * KIB_PER_PAGE,
        waited_ns=waited_ns,
    )


class _Process(NamedTuple):
    parent: int
    ended_children_ns: int


def _processes() -> dict[int, _Process]:
    """Read all processes of the machine, ended ones too for which nobody waited."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
                ticks = int(fields[CHILDREN_USER]) + int(fields[CHILDREN_SYSTEM])
                processes[int(name)] = _Process(
                    int(fields[PARENT]), ticks * NS_PER_TICK
                )
    return processes


def _below(root: int, processes: dict[int, _Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    below = list(children.get(root, ()))
    for pid in below:
        below += children.get(pid, ())
    return below


def _add_threads(pid: int, ran_ns: dict[int, int], waited_ns: dict[int, int]) -> None:
    """Add how long each thread ran, and waited for a core, by its id.

    Linux, Documentation/scheduler/sched-stats.
    """
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            text = _read(f"/proc/{pid}/task/{thread}/schedstat")
            ran, waited, *_ = map(int, text.split())
            if ran:
                ran_ns[int(thread)], waited_ns[int(thread)] = ran, waited


def _read(path: str) -> bytes:
    """Read a small file; a server has hundreds, and a hold waits for them."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1_024)
    finally:
        os.close(file)
