# SPDX-License-Identifier: Apache-2.0
"""The options of a replay; the header of its records repeats them."""

from __future__ import annotations

import msgspec


class ReplayError(Exception):
    """The replay cannot begin; the message says what does not fit, and what to do."""


class Options(msgspec.Struct, frozen=True):
    """Where `max_inflight_sessions` is None, sessions begin when the trace says."""

    url: str
    trace: str
    model: str | None = None
    vocab_size: int = 32_000
    time_scale: float = 1.0
    max_inflight_sessions: int | None = None
    request_limit: int | None = None
    timeout_s: float = 600.0
    lag_budget_ms: float = 50.0
    warmup_s: float = 0.0

    @property
    def load(self) -> str:
        """How sessions begin, in words."""
        if self.max_inflight_sessions is None:
            return f"open loop: sessions begin at arrival_s x {self.time_scale:g}"
        return (
            f"closed loop: {self.max_inflight_sessions} sessions in flight, the next "
            "one begins when one has ended; arrival_s is not used"
        )
