# SPDX-License-Identifier: Apache-2.0
"""Wake an event loop at a given nanosecond.

`asyncio.sleep` rounds up to whole milliseconds (epoll takes its timeout in those). A
timerfd is one more file to wait for, and the kernel makes it readable on time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from heapq import heappop, heappush
from itertools import count
from time import perf_counter_ns
from typing import Self

# os.timerfd_create is there from Python 3.13 on.
# PyDLL keeps the GIL: the calls take a microsecond, to get it back can take many.
_libc = ctypes.PyDLL(None, use_errno=True)
_CLOCK_MONOTONIC = 1  # what perf_counter_ns reads
_TFD_TIMER_ABSTIME = 1


class _Itimerspec(ctypes.Structure):
    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class Alarm:
    """A timer of the running loop, for any number of waiters."""

    def __init__(self) -> None:
        self._fd = _checked(
            _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        )
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def sleep_until(self, due_ns: int) -> None:
        """Return at `due_ns` of perf_counter_ns, at once if that has passed."""
        if due_ns <= perf_counter_ns():
            return
        waiter = self._loop.create_future()
        heappush(self._waiters, (due_ns, next(self._order), waiter))
        if self._waiters[0][2] is waiter:
            self._set(due_ns)
        await waiter

    def _set(self, due_ns: int) -> None:
        spec = _Itimerspec(0, 0, *divmod(due_ns, 1_000_000_000))
        _checked(
            _libc.timerfd_settime(
                self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None
            )
        )

    def _ring(self) -> None:
        os.read(self._fd, 8)
        now_ns = perf_counter_ns()
        while self._waiters and self._waiters[0][0] <= now_ns:
            _, _, waiter = heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._set(self._waiters[0][0])


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
