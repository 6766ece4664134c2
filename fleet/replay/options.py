# SPDX-License-Identifier: Apache-2.0
"""The options of a replay; the header of its records repeats them."""

from __future__ import annotations

import msgspec


class ReplayError(Exception):
    """The replay cannot begin; the message says what does not fit, and what to do."""


class Options(msgspec.Struct, frozen=True):
    """`time_scale` divides the trace's times: 20 is twenty times faster.

    Sessions begin when the trace says, and wait while `max_inflight_sessions` are in
    flight. With `closed_loop` they only wait for that. A replayer with the `share`
    (0, 3) sends the first of every three sessions, and has slots of its own.
    """

    url: str
    trace: str
    model: str | None = None
    vocab_size: int = 32_000
    time_scale: float = 1.0
    max_inflight_sessions: int | None = None
    closed_loop: bool = False
    request_limit: int | None = None
    share: tuple[int, int] | None = None
    timeout_s: float = 600.0
    lag_budget_ms: float = 50.0
    warmup_s: float = 0.0

    @property
    def load(self) -> str:
        """How sessions begin, in words."""
        slots = self.max_inflight_sessions
        if self.closed_loop:
            return (
                f"closed loop: {slots} sessions in flight, the next one begins when "
                "one has ended; arrival_s is not used"
            )
        load = f"open loop: sessions begin at arrival_s / {self.time_scale:g}"
        if slots is None:
            return load
        return f"{load}, or later, when fewer than {slots} are in flight"
