# SPDX-License-Identifier: Apache-2.0
"""replay.jsonl: what became of every request of a replayed trace."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from kvtax.records.requests import Account, RequestOutcome
from kvtax.records.steps import Natural

# What stays as it is, beside letters and digits.
_IN_HEADER = " /:;,.@+=~#!$&'()*|?[]"


def in_header(name: str) -> str:
    """Encode a session's or a request's name for a header."""
    return quote(name, safe=_IN_HEADER)


class ReplayHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.replay/1"
):
    """Header; written by the replayer before the first request."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    load: str | None = None
    """Open or closed loop, in words."""
    options: Any = None
    """The options as resolved: `kvtax_fleet/replay/options.py`."""
    model: str | None = None
    """The requested model."""
    max_model_len: int | None = None
    """The longest request that the server takes; null if it does not say."""
    scheduled: int = 0
    """Requests of the trace."""
    sessions: int = 0
    """Sessions of the trace."""
    trace_sha256: str | None = None
    """Of the trace's file."""


class ReplayedRequest(RequestOutcome, tag_field="type", tag="request"):
    """RequestOutcome of one request of the trace; one line each, as they ended."""

    id: str
    """`<session>/<turn>`, unique; sent as `X-Request-Id`, percent-quoted where a
    header needs it."""
    session: str
    """As the trace has it."""
    turn: int
    """Counts from 0 in its session."""
    arrival_s: float | None = None
    """Arrival in the trace. A session's first turn is due then, or later, when a slot
    is free; in a closed loop when a slot is free. A later turn is due `think_s` after
    `end_ns` of the turn before. The time scale divides both times."""
    input_tokens: int | None = None
    """Requested prompt tokens."""
    output_tokens: int | None = None
    """Requested output tokens, at least 1."""
    instance: str | None = None
    """The answer's `X-Kvtax-Instance`."""
    prefill_instance: str | None = None
    """The answer's `X-Kvtax-Prefill`."""
    usage_prompt_tokens: Natural | None = None
    """The server's count; the request is `failed` if it differs from the request."""
    usage_completion_tokens: Natural | None = None
    """The server's count; the request is `failed` if it differs from the request."""
    cached_tokens: int | None = None
    """Prompt tokens that were not computed; null if the server does not say."""


class Steady(msgspec.Struct):
    """The time in which the load neither rose nor ran out."""

    start_ns: int
    """Requests due from here on belong to it."""
    end_ns: int
    """Requests due from here on do not."""


class ReplayEnd(Account, kw_only=True, tag_field="type", tag="end"):
    """The replayer's account; the last line, absent if the replayer was killed."""

    steady: Steady | None = None
    """The steady window; null if a signal stopped the replay, or nothing is left."""
    held_sessions: int = 0
    """Sessions of an open loop that found all slots taken when they arrived."""
    held_s_max: float = 0.0
    """The longest that one of them waited for a slot; its latency does not count it."""
    replay_cpu_s: float | None = None
    """CPU time of the replayer."""
