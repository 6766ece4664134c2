# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of a server: of all its processes, and of their threads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtax.records.requests import CpuReading

# File of the null model's account (KVTAX_FORWARD_TOTALS), beside the driver's records.
FORWARDS = "forwards.int64"
KIB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") // 1_024
NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name (proc_pid_stat(5)).
PARENT, CHILDREN_USER, CHILDREN_SYSTEM = 1, 13, 14


def read_cpu(supervisor: int, forward_totals: Path | None = None) -> CpuReading:
    """Read the CPU time and the memory of the processes below `supervisor`.

    That of a process has its threads that ended, to the nanosecond, and its children
    that ended, in ticks of 10 ms. The supervisor waits for orphans. `forward_totals` is
    the null model's account of its forwards.
    """
    processes = _processes()
    known = processes.get(supervisor)
    total_ns, threads = known.ended_children_ns if known else 0, dict[int, int]()
    anonymous_pages = 0
    for pid in _below(supervisor, processes):
        with suppress(OSError):
            # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)
            total_ns += processes[pid].ended_children_ns
            threads |= _threads_ns(pid)
            _, resident, of_files, *_ = map(int, _read(f"/proc/{pid}/statm").split())
            anonymous_pages += resident - of_files
    forwards, slept_ns = _forwards(forward_totals)
    return CpuReading(
        time.perf_counter_ns(),
        total_ns,
        threads,
        anonymous_kib=anonymous_pages * KIB_PER_PAGE,
        forwards=forwards,
        slept_ns=slept_ns,
    )


def _forwards(totals: Path | None) -> tuple[int | None, int | None]:
    """Return the number of forwards so far and their sleep; None without a file."""
    if totals is None or not totals.exists():
        return None, None
    forwards, _, slept_ns = np.fromfile(totals, np.int64).tolist()
    return forwards, slept_ns


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


def _threads_ns(pid: int) -> dict[int, int]:
    """Read how long each thread ran (Linux, Documentation/scheduler/sched-stats)."""
    threads_ns = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            text = _read(f"/proc/{pid}/task/{thread}/schedstat")
            if ns := int(text.partition(b" ")[0]):
                threads_ns[int(thread)] = ns
    return threads_ns


def _read(path: str) -> bytes:
    """Read a small file; a server has hundreds, and a hold waits for them."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1_024)
    finally:
        os.close(file)
