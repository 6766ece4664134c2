# SPDX-License-Identifier: Apache-2.0
"""What the driver and the replayer both record: how each request went, and the totals.

Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Outcome(msgspec.Struct, kw_only=True):
    """How a request went; the sender fills it in as it learns."""

    status: Literal["ok", "failed", "cancelled"] | None = None
    """How it ended; no line is written before it has."""
    error: str | None = None
    """Why it is not ok."""
    http_status: int | None = None
    """Of the answer; null if there was none."""
    intended_ns: int | None = None
    """When it was due; null if that never came."""
    sent_ns: int | None = None
    """When the first byte of the body was handed to the socket."""
    first_token_ns: int | None = None
    """First event with tokens."""
    end_ns: int | None = None
    """Last event with tokens; of a request that is not ok, when it was given up."""


class Account(msgspec.Struct, kw_only=True):
    """The sender's own account of a run: its last line, absent if it was killed."""

    scheduled: int
    """Requests that were to be sent."""
    ok: int
    """Requests with a whole answer."""
    failed: int
    """Requests with an error, or without a whole answer."""
    cancelled: int
    """Requests that were given up or never sent."""
    lag_ms: dict[str, float] | None = None
    """`p50`, `p90`, `p99`, `max` of actual less intended send; null if nothing was
    sent."""
    lag_budget_ms: float | None = None
    """What p99 of the lag may be."""
    valid: bool | None = None
    """Whether p99 of the lag is within its budget."""
