# SPDX-License-Identifier: Apache-2.0
"""CPU time and written bytes of what runs beside the engine's thread.

Its process must have been started by kvtax.proc.supervise, so that a helper which has
left its parent is still below the supervisor.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import psutil

# Package of vLLM whose threads write the records.
RECORDER = "vllm.kvtax_probe"


class CpuTimes(NamedTuple):
    """CPU time in ns of the other threads of this process, and of its helpers."""

    threads: int
    processes: int


def helpers() -> list[int]:
    """List the processes below the supervisor, but for this one."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(os.getppid()).children(recursive=True)
        return [process.pid for process in below if process.pid != os.getpid()]
    return []


def threads_of_vllm() -> set[int]:
    """Return the ids of the threads that were there before the connector."""
    ids: set[int] = import_module(f"{RECORDER}.threads").threads_of_executor()
    return ids | {threading.get_native_id()}


def cpu_ns_beside(of_vllm: Iterable[int], helpers: Iterable[int]) -> CpuTimes:
    """Return the CPU time of all threads but vLLM's and the recorder's."""
    others = sum(map(_thread_ns, {*of_vllm, *_recorders()}))
    threads = time.process_time_ns() - others
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_ns = round((ended.ru_utime + ended.ru_stime) * 1e9)
    return CpuTimes(threads, ended_ns + sum(map(_process_ns, helpers)))


def written_bytes(helpers: Iterable[int]) -> int:
    """Return the bytes that this process and its helpers have written to files."""
    return _written("self") + sum(_written(str(pid)) for pid in helpers)


def _recorders() -> Iterator[int]:
    """Yield the ids of the recorder's threads, by the code that they run.

    By a name they would not be known: anybody can give a thread any name.
    """
    for thread in threading.enumerate():
        module = getattr(getattr(thread, "_target", None), "__module__", None) or ""
        if module.startswith(f"{RECORDER}.") and thread.native_id is not None:
            yield thread.native_id


def _thread_ns(thread: int) -> int:
    with suppress(OSError):
        # The clock of a thread, as in the kernel's CPUCLOCK_PERTHREAD | _SCHED.
        return time.clock_gettime_ns((~thread << 3) | 6)
    return 0


def _process_ns(pid: int) -> int:
    with suppress(OSError):
        # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
        return time.clock_gettime_ns((~pid << 3) | 2)
    return 0


def _written(pid: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
