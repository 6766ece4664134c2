# SPDX-License-Identifier: Apache-2.0
"""The options of a replay; the header of its records repeats them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ReplayError(Exception):
    """The replay cannot begin; the message says what does not fit, and what to do."""

    exit_code = 2


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a replay. Fields with a description are options of the command.

    Sessions begin when the trace says, and wait while `max_inflight_sessions` are in
    flight. With `closed_loop` they only wait for that.
    """

    url: Annotated[str, Meta(description="root of the server, http://HOST:PORT")]
    trace: Annotated[str, Meta(description="any format that kvtax trace reads")]
    model: (
        Annotated[str, Meta(description="default: the only model of the server")] | None
    ) = None
    vocab_size: Annotated[
        int, Meta(ge=2, description="token ids of prompts are below N")
    ] = 32_000
    time_scale: Annotated[
        float,
        Meta(
            ge=0.001,
            description="divide arrival and think times by N: 20 is twenty times "
            "faster",
        ),
    ] = 1.0
    max_inflight_sessions: (
        Annotated[
            int,
            Meta(
                ge=1, description="sessions in flight at most; more wait for one to end"
            ),
        ]
        | None
    ) = None
    closed_loop: Annotated[
        bool,
        Meta(description="ignore arrival times: sessions begin when others end"),
    ] = False
    trace_times: Annotated[
        bool,
        Meta(
            description="a turn is due when the trace says, or after the answer before "
            "if that is later; default: its think time after that answer"
        ),
    ] = False
    request_limit: (
        Annotated[int, Meta(ge=1, description="only the first N requests of the trace")]
        | None
    ) = None
    timeout_s: Annotated[
        float, Meta(ge=0.001, description="seconds for a whole answer")
    ] = 600.0
    lag_budget_ms: Annotated[
        float, Meta(ge=0.001, description="limit for p99 of the send lag, in ms")
    ] = 50.0

    @property
    def load(self) -> str:
        """Describe how sessions begin."""
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
