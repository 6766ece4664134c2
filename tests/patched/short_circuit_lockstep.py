# SPDX-License-Identifier: Apache-2.0
"""Two workers that are told the same at the same time: every step must report the same.

The clock is one of ours, so that entries expire to the instant, and each event is
over on both sides before the next step: whatever differs is the method's doing.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from mooncake_party import SENDER_THREADS, WAIT_S, Party, set_timeout

STEPS = 400
MOST_SENDING = SENDER_THREADS // 2


class Clock:
    """Stands in for the module `time` of the connector."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def perf_counter(self) -> float:
        return self.now_s


class Lockstep:
    """Random events for two workers, upstream's and another, from one seed."""

    def __init__(self, upstream: Party, other: Party, seed: int) -> None:
        self._upstream, self._other = upstream, other
        self._parties = (upstream, other)
        self._chooser = random.Random(seed)
        self._clock = Clock()
        self._names = iter(f"r{number}" for number in range(STEPS * 10))
        self._registered: set[str] = set()
        self._asked_early: dict[str, list] = {}
        self._expires_s: dict[str, float] = {}
        self._sending: dict[str, list] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> Lockstep:
        modules = [party.module for party in self._parties]
        for module in modules:
            module.time = self._clock
        try:
            for step in range(STEPS):
                for _ in range(self._chooser.randrange(4)):
                    self._event()
                self._both("let_loops_idle")
                self._compare(step)
        finally:
            for module in modules:
                module.time = time
        return self

    def _event(self) -> None:
        events = [self._time_passes]
        if self._upstream.sends:
            events += [self._register, self._record, self._pull, self._end, self._abort]
        if self._upstream.receives:
            events += [self._receive]
        self._chooser.choice(events)()

    def _both(self, call: str, *arguments: Any, **options: Any) -> list:
        return [getattr(p, call)(*arguments, **options) for p in self._parties]

    def _pick(self, names) -> str | None:
        return self._chooser.choice(sorted(names)) if names else None

    def _time_passes(self) -> None:
        later = [s for s in self._expires_s.values() if s > self._clock.now_s]
        if later and self._chooser.random() < 0.5:
            # To the instant, at which it has not expired yet.
            self._clock.now_s = self._chooser.choice(later)
        else:
            self._clock.now_s += self._chooser.random()

    def _register(self) -> None:
        name = next(self._names)
        if self._chooser.random() < 0.3:  # the decoder was faster
            self._asked_early[name] = self._both("pull", name)
        self._both("step", registered=[name])
        self._registered.add(name)

    def _record(self) -> None:
        if (name := self._pick(self._registered)) is None:
            return
        if name in self._asked_early and len(self._sending) == MOST_SENDING:
            return
        self._registered.remove(name)
        timeout_s = self._chooser.choice((0.5, 1, 2, 5))
        set_timeout(timeout_s)
        self._both("step", ready=[name])
        self._expires_s[name] = self._clock.now_s + timeout_s
        self.counts["records"] += 1
        if name in self._asked_early:
            self._both("wait_sending", name)
            self._sending[name] = self._asked_early.pop(name)
        self._both("let_loops_idle")  # the timeout is read on the loop
        set_timeout(1_000)

    def _pull(self) -> None:
        name = self._pick(self._expires_s.keys() - self._sending.keys())
        if name is not None and len(self._sending) < MOST_SENDING:
            self._sending[name] = self._both("pull", name)
            self._both("wait_sending", name)

    def _end(self) -> None:
        if (name := self._pick(self._sending)) is not None:
            status = self._chooser.choice((0, 0, -1))
            self._both("end_transfer", name, status)
            for future in self._sending.pop(name):
                future.result(WAIT_S)
            if status == 0:
                del self._expires_s[name]

    def _abort(self) -> None:
        if (name := self._pick(self._registered)) is not None:
            self._registered.remove(name)
            self._asked_early.pop(name, None)
            self._both("step", not_processed=[name])

    def _receive(self) -> None:
        names = [next(self._names) for _ in range(self._chooser.randrange(1, 4))]
        cut = self._chooser.randrange(len(names) + 1)
        for future in self._both("receive", names[:cut], names[cut:]):
            future.result(WAIT_S)

    def _compare(self, step: int) -> None:
        asked = self._other.asks
        expected, found = self._both("report")
        if expected != found:
            self.problems.append(f"step {step}: {found}, upstream {expected}")
        expired = self._expires_s.keys() & (expected[0] or set())
        for name in expired:
            del self._expires_s[name]
        self.counts["reports"] += any(expected)
        self.counts["expiries"] += len(expired)
        # An entry that expires while it is being sent has to be asked after.
        due = any(s <= self._clock.now_s for s in self._expires_s.values())
        self.counts["asks_in_vain"] += (
            self._other.asks > asked and not any(expected) and not due
        )
