# SPDX-License-Identifier: Apache-2.0
"""CPU time of a server: of all its processes, and of each of their threads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from kvtax.records.requests import CpuReading

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name (proc_pid_stat(5)).
CHILDREN_USER, CHILDREN_SYSTEM = 13, 14


def read_cpu(supervisor: int) -> CpuReading:
    """Read the CPU time of the processes below `supervisor`.

    That of a process has its threads that ended, to the nanosecond, and its children
    that ended, in ticks of 10 ms. The supervisor waits for orphans.
    """
    total_ns, threads = 0, dict[int, int]()
    with suppress(OSError):
        total_ns = _ended_children_ns(supervisor)
    for pid in _below(supervisor):
        with suppress(OSError):
            # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)
            total_ns += _ended_children_ns(pid)
            threads |= _threads_ns(pid)
    return CpuReading(time.perf_counter_ns(), total_ns, threads)


def _below(supervisor: int) -> list[int]:
    """List the processes below `supervisor`, those too that nobody has waited for."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(supervisor).children(recursive=True)
        return [process.pid for process in below]
    return []


def _ended_children_ns(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[CHILDREN_USER]) + int(fields[CHILDREN_SYSTEM])
    return ticks * 1_000_000_000 // TICKS_PER_S


def _threads_ns(pid: int) -> dict[int, int]:
    """Read how long each thread ran (Linux, Documentation/scheduler/sched-stats)."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            if ns := int(text.split()[0]):
                found[int(thread)] = ns
    return found
