# SPDX-License-Identifier: Apache-2.0
"""threads.jsonl: CPU time of the engine's process by thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from .files import RecordFile

TASKS = "/proc/self/task"
# Threads that were there before the first connector: dozens of vLLM's own.
EXECUTOR = "model executor"
MAIN = "MainThread"
# Threads that ended since the record before, or began and ended.
ENDED = "ended threads"
# Time between records while the engine makes no steps.
IDLE_S = 10

_of_executor: set[int] | None = None


def threads_of_executor() -> set[int]:
    """Return the threads that were there when this was first called.

    That is before the first connector is made, or at the first step if none is.
    """
    global _of_executor
    if _of_executor is None:
        _of_executor = _thread_ids()
    return _of_executor


class ThreadTimes(msgspec.Struct):
    """CPU time of each thread since the record before."""

    t_ns: int
    step_id: int
    threads: dict[str, float]


class ThreadsFile(RecordFile):
    """File that gets a record whenever it is flushed, from the flushing thread."""

    def __init__(
        self, life: str, last_step_id: Callable[[], int], of_executor: set[int]
    ):
        self._last_step_id = last_step_id
        self._of_executor = of_executor - {os.getpid()}
        self._recorded_step_id, self._recorded_s = -1, time.monotonic()
        self._last_ns, self._ended_ns = _cpu_ns_of_threads()
        super().__init__(life, "threads", "kvtax.threads/1")

    def _write_pending(self) -> None:
        """Write a record, unless the engine is idle and has one of late."""
        idle = self._last_step_id() == self._recorded_step_id
        if not idle or time.monotonic() > self._recorded_s + IDLE_S:
            self.append(self._record())
        super()._write_pending()

    def _record(self) -> ThreadTimes:
        # The step first: it has begun by t_ns, however long this thread is held up.
        step_id, t_ns = self._last_step_id(), time.perf_counter_ns()
        self._recorded_step_id, self._recorded_s = step_id, time.monotonic()
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


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir(TASKS)}
    except OSError:
        return set()


def _cpu_ns_of_threads() -> tuple[dict[int, int], int]:
    """Return CPU time by thread id, and at least that of all threads that ended."""
    process_ns = time.process_time_ns()
    cpu_ns = {}
    for thread in _thread_ids():
        try:
            # The clock of a thread, as in the kernel's CPUCLOCK_PERTHREAD | _SCHED.
            cpu_ns[thread] = time.clock_gettime_ns((~thread << 3) | 6)
        except OSError:
            continue
    return cpu_ns, process_ns - sum(cpu_ns.values())


def _names(threads: set[int]) -> dict[int, str]:
    """Return a name of each thread id, with the id: in `threading`, or the kernel's."""
    python = {thread.native_id: _name(thread) for thread in threading.enumerate()}
    # In a forked process `threading` has the id of its parent's.
    python[os.getpid()] = MAIN
    return {
        thread: f"{python.get(thread) or _foreign(_comm(thread))}#{thread}"
        for thread in threads
    }


def _name(thread: threading.Thread) -> str:
    """Return a thread's name, after `vllm` or `recorder` if these have started it.

    By the code that it runs: anybody can give a thread any name.
    """
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    if module.startswith(__package__ + "."):
        return f"recorder {thread.name}"
    if module.startswith("vllm.v1.engine."):
        return f"vllm {thread.name}"
    return _foreign(thread.name)


def _foreign(name: str) -> str:
    """Return the name of a thread that neither has started, which must not look so."""
    return f"thread {name}" if name.startswith((MAIN, "vllm ", "recorder ")) else name


def _comm(thread: int) -> str:
    try:
        # The kernel cuts a name off after 15 bytes, inside of a character, too.
        with open(f"{TASKS}/{thread}/comm", errors="replace") as file:
            return file.read().rstrip()
    except OSError:
        return "ended"
