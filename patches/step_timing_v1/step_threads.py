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

TASKS = "/proc/self/task"
# Those that were there once the model executor was made count as one: dozens of vLLM's
# own, and none of a connector's.
EXECUTOR = "model executor"
# Those that ended since the record before, or began and ended.
ENDED = "ended threads"


def thread_ids() -> set[int]:
    return {int(name) for name in os.listdir(TASKS)}


class ThreadTimes(msgspec.Struct):
    """CPU time of each thread since the record before."""

    t_ns: int
    step_id: int
    threads: dict[str, float]


class ThreadsFile(RecordFile):
    """Adds a record whenever the file is written, in the thread that does that."""

    def __init__(
        self, directory: str, last_step_id: Callable[[], int], of_executor: set[int]
    ):
        self._last_step_id = last_step_id
        self._of_executor = of_executor - {os.getpid()}
        self._last_ns, self._ended_ns = _cpu_ns_of_threads()
        super().__init__(directory, "threads", {})

    def flush(self) -> None:
        self.append(self._record())
        super().flush()

    def _record(self) -> ThreadTimes:
        # The step first: it has begun by t_ns, however long this thread is held up.
        step_id, t_ns = self._last_step_id(), time.perf_counter_ns()
        now_ns, ended_ns = _cpu_ns_of_threads()
        names = _names(now_ns.keys() - self._of_executor)
        # What a thread took before it ended is the process's now.
        gone = self._last_ns.keys() - now_ns.keys()
        known_ns = self._ended_ns + sum(self._last_ns[thread] for thread in gone)
        threads = {EXECUTOR: 0.0, ENDED: max(ended_ns - known_ns, 0) / 1e3}
        for thread, cpu_ns in now_ns.items():
            name = names.get(thread, EXECUTOR)
            spent_us = (cpu_ns - self._last_ns.get(thread, 0)) / 1e3
            threads[name] = threads.get(name, 0) + spent_us
        self._last_ns, self._ended_ns = now_ns, max(ended_ns, self._ended_ns)
        return ThreadTimes(t_ns, step_id, threads)


def _cpu_ns_of_threads() -> tuple[dict[int, int], int]:
    """CPU time by thread id, and at least that of all threads that ended so far."""
    process_ns = time.process_time_ns()
    found = {}
    for thread in thread_ids():
        try:
            # The clock of a thread, as in the kernel's CPUCLOCK_PERTHREAD | _SCHED.
            found[thread] = time.clock_gettime_ns((~thread << 3) | 6)
        except OSError:
            continue
    return found, process_ns - sum(found.values())


def _names(threads: set[int]) -> dict[int, str]:
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
