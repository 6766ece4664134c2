# SPDX-License-Identifier: Apache-2.0
"""Offset of another host's CLOCK_MONOTONIC from ours, measured as NTP does.

We ask what time it is there, by UDP. If the way there takes as long as the way back,
the clock is ahead by the answer less the middle of our waiting; that is wrong by half
of what both ways took at most. So of several answers the quickest counts.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

TRIES = 16
TIMEOUT_S = 0.5
ASKED = struct.Struct("!q")
ANSWERED = struct.Struct("!qqq")
_numbers = count()


class Reading(NamedTuple):
    """At `at_ns` of our clock the other one was `ahead_ns` ahead, give or take half of
    `round_trip_ns`."""

    at_ns: int
    ahead_ns: float
    round_trip_ns: int


class ClockServer:
    """Says what time it is here to those who ask at (`host`, `port`)."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            content, asker = self._socket.recvfrom(ANSWERED.size)
            came_ns = time.perf_counter_ns()
            if len(content) == ASKED.size:
                (number,) = ASKED.unpack(content)
                answer = ANSWERED.pack(number, came_ns, time.perf_counter_ns())
                self._socket.sendto(answer, asker)


def read_clock(host: str, port: int) -> Reading:
    """Ask the ClockServer there. Raises OSError if it does not answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        asking.settimeout(TIMEOUT_S)
        found = [one for _ in range(TRIES) if (one := _asked(asking)) is not None]
    if not found:
        raise TimeoutError(f"nobody says what time it is at {host}:{port}")
    return min(found, key=lambda one: one.round_trip_ns)


def _asked(asking: socket.socket) -> Reading | None:
    """Measure one round trip; None without an answer before the deadline."""
    number = next(_numbers)
    sent_ns = time.perf_counter_ns()
    asking.send(ASKED.pack(number))
    try:
        while True:
            answer = asking.recv(ANSWERED.size)
            now_ns = time.perf_counter_ns()
            answers, came_ns, left_ns = ANSWERED.unpack(answer)
            if answers == number:
                break
    except TimeoutError:
        return None
    ahead_ns = ((came_ns - sent_ns) + (left_ns - now_ns)) / 2
    round_trip_ns = (now_ns - sent_ns) - (left_ns - came_ns)
    return Reading((sent_ns + now_ns) // 2, ahead_ns, round_trip_ns)


class Clock:
    """Another host's clock, from readings in order of time: at least one.

    Between two readings it is taken to drift evenly, and before the first and after the
    last not at all.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        at_ns, ahead_ns, self._round_trip_ns = map(
            np.array, zip(*readings, strict=True)
        )
        self._at_ns, self._ahead_ns = at_ns, ahead_ns
        self._there_ns = at_ns + ahead_ns
        self.ahead_us = float(ahead_ns[0]) / 1e3
        self.drift_us = float(ahead_ns[-1] - ahead_ns[0]) / 1e3

    @property
    def residual_us(self) -> float:
        """Bound on the offset's error between readings.

        Half of the slowest reading's round trip, and what the clock did besides
        drifting evenly from the first reading to the last.
        """
        ends = [0, -1]
        even_ns = np.interp(self._at_ns, self._at_ns[ends], self._ahead_ns[ends])
        uneven_ns = np.abs(self._ahead_ns - even_ns).max()
        return float(self._round_trip_ns.max() / 2 + uneven_ns) / 1e3

    def ours_ns(self, there_ns: int) -> int:
        """Our time when it is `there_ns` there."""
        return there_ns - round(np.interp(there_ns, self._there_ns, self._ahead_ns))

    def there_ns(self, ours_ns: int) -> int:
        """Convert our time `ours_ns` to the time there."""
        return ours_ns + round(np.interp(ours_ns, self._at_ns, self._ahead_ns))
