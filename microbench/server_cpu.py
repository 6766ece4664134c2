# SPDX-License-Identifier: Apache-2.0
"""CPU time of a server: of all its processes, and of each of their threads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from kvtax.proc.supervise import descendants
from kvtax.records.requests import CpuReading


def read_cpu(supervisor: int) -> CpuReading:
    """Read the CPU time of the processes below `supervisor`.

    That of a process has its threads that ended, to the nanosecond, and its children
    that ended, in ticks of 10 ms.
    """
    total_ns, threads = 0, dict[int, int]()
    for pid in descendants(supervisor):
        with suppress(OSError, psutil.NoSuchProcess):
            # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
            total_ns += time.clock_gettime_ns((~pid << 3) | 2)
            ended = psutil.Process(pid).cpu_times()
            total_ns += round(1e9 * (ended.children_user + ended.children_system))
            threads |= _threads_ns(pid)
    return CpuReading(time.perf_counter_ns(), total_ns, threads)


def _threads_ns(pid: int) -> dict[int, int]:
    """Read how long each thread ran (Linux, Documentation/scheduler/sched-stats)."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            if ns := int(text.split()[0]):
                found[int(thread)] = ns
    return found
