# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: an event loop whose time passes only when nothing is left to do.

asyncio's own loop asks how long it may sleep until its next timer. This one does not
sleep: it makes it that time. So whatever waits by asyncio (timeouts, sleeps, queues)
waits in virtual time, and runs as fast as it can. Timers that are due at the same
moment go off in the order in which they were set.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from heapq import heappush
from itertools import count
from typing import Any, TypeVarTuple, Unpack

# Times are whole nanoseconds: a timer due within half of one is due now.
RESOLUTION_S = 0.5e-9
_Args = TypeVarTuple("_Args")


class Deadlock(RuntimeError):
    """All tasks wait, and no timer is left."""


class _Timer(asyncio.TimerHandle):
    """A timer with its place among those that are due at the same moment."""

    __slots__ = ("_place",)
    # asyncio's own, and ours.
    _when: float
    _scheduled: bool
    _place: int

    def __lt__(self, other: Any) -> bool:
        return (self._when, self._place) < (other._when, other._place)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files, sockets and threads; its time starts at 0 s."""

    # asyncio's own heap of timers.
    _scheduled: list[_Timer]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._places = count()
        self._selector = self
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._now_s

    def now_ns(self) -> int:
        return round(self._now_s * 1e9)

    async def sleep_until(self, due_ns: int) -> None:
        """Return at `due_ns`, at once if that has passed."""
        if due_ns <= self.now_ns():
            return
        waiter = self.create_future()
        timer = self.call_at_ns(due_ns, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def call_at_ns(
        self, due_ns: int, callback: Callable[..., Any], *args: Any
    ) -> asyncio.TimerHandle:
        return self.call_at(due_ns / 1e9, callback, *args)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer._place = next(self._places)
        heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the time to the next timer, in place of waiting. Raises Deadlock."""
        if timeout is None:
            raise Deadlock("all tasks wait, and no timer is left")
        if timeout > 0:
            self._now_s = self._scheduled[0]._when
            # From 48 days on a double no longer has half nanoseconds.
            self._clock_resolution = max(RESOLUTION_S, math.ulp(self._now_s))
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no events of files."""


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
