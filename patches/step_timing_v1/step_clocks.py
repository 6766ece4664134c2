# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a step takes of the machine, and how fast the machine is."""

import os
import time
from typing import Any

# The clock of the calling thread, and that of all threads together.
thread_cpu_ns = time.thread_time_ns
process_cpu_ns = time.process_time_ns

LOOP_EVERY_STEPS = 16
# Some 50 us. It must stay the same: runs are compared by it.
LOOP_ROUNDS = 1_400


class EngineClocks:
    """Read when a step has ended, in the engine's thread, which must make it, too."""

    __slots__ = ("_last", "_schedstat")

    def __init__(self):
        self._last: tuple[int, int, int] | None = None
        self._schedstat = _open_schedstat()

    def end_step(self, step: Any) -> None:
        """Note the times since the last call. Now and then, run the loop as well."""
        now = self._read()
        if self._last is not None:
            thread_ns, process_ns, run_delay_ns = self._last
            step.thread_cpu_us = (now[0] - thread_ns) / 1e3
            step.cpu_us = (now[1] - process_ns) / 1e3
            if self._schedstat is not None:
                step.run_delay_us = (now[2] - run_delay_ns) / 1e3
        if step.step_id % LOOP_EVERY_STEPS == 0:
            began_ns = thread_cpu_ns()
            _fixed_loop()
            step.loop_us = (thread_cpu_ns() - began_ns) / 1e3
            now = self._read()
        self._last = now

    def _read(self) -> tuple[int, int, int]:
        """CPU time of this thread and of the process, and the thread's run delay."""
        run_delay_ns = 0
        if self._schedstat is not None:
            run_delay_ns = int(os.pread(self._schedstat, 64, 0).split()[1])
        return thread_cpu_ns(), process_cpu_ns(), run_delay_ns


def _open_schedstat() -> int | None:
    """This thread's file: ns on a core, ns runnable but waiting, time slices.

    A kernel that does not count them has no such file, or zeros in it.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
    if int(os.pread(file, 64, 0).split()[0]):
        return file
    os.close(file)
    return None


def _fixed_loop() -> int:
    total = 0
    for number in range(LOOP_ROUNDS):
        total += number & 7
    return total
