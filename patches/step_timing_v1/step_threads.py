# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""threads.jsonl: which threads the CPU time of this process goes to."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from vllm.v1.step_record_file import RecordFile

INTERVAL_NS = 500_000_000
TASKS = "/proc/self/task"


class ThreadTimes(msgspec.Struct):
    """CPU time of each thread since the record before."""

    t_ns: int
    step_id: int
    threads: dict[str, float]


class ThreadsFile(RecordFile):
    """Adds a record twice a second, in the thread that writes the file."""

    def __init__(self, directory: str, last_step_id: Callable[[], int]):
        self._last_step_id = last_step_id
        self._last_ns = _cpu_ns_of_threads()
        self._due_ns = time.perf_counter_ns() + INTERVAL_NS
        super().__init__(directory, "threads", {})

    def flush(self) -> None:
        if time.perf_counter_ns() >= self._due_ns:
            self._due_ns += INTERVAL_NS
            self.append(self._record())
        super().flush()

    def _record(self) -> ThreadTimes:
        t_ns, now_ns = time.perf_counter_ns(), _cpu_ns_of_threads()
        names = _names(now_ns)
        threads = {
            names[thread]: (cpu_ns - self._last_ns.get(thread, 0)) / 1e3
            for thread, cpu_ns in now_ns.items()
        }
        self._last_ns = now_ns
        return ThreadTimes(t_ns, self._last_step_id(), threads)


def _cpu_ns_of_threads() -> dict[int, int]:
    """CPU time by thread id. Threads that end meanwhile are left out."""
    found = {}
    for name in os.listdir(TASKS):
        thread = int(name)
        try:
            # The clock of a thread, as in the kernel's CPUCLOCK_PERTHREAD | _SCHED.
            found[thread] = time.clock_gettime_ns((~thread << 3) | 6)
        except OSError:
            continue
    return found


def _names(threads: dict[int, int]) -> dict[int, str]:
    """The name of each thread id, unique: in `threading`, or what the kernel says."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = {thread: python.get(thread) or _comm(thread) for thread in threads}
    count = Counter(names.values())
    return {
        thread: name if count[name] == 1 else f"{name}#{thread}"
        for thread, name in names.items()
    }


def _comm(thread: int) -> str:
    try:
        with open(f"{TASKS}/{thread}/comm") as file:
            return file.read().rstrip()
    except OSError:
        return "ended"
