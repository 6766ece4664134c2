# SPDX-License-Identifier: Apache-2.0
"""What a replay records: each request as the trace asks for it, and how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleet.replay.options import Options
from fleet.trace import Request
from lab.load.ledger import Ledger
from lab.records.replay import ReplayedRequest, ReplayHeader

# The error of a request that was cancelled.
STOPPED = "replay stopped"


def new_ledger(path: Path, options: Options, **header: Any) -> Ledger:
    """The ledger of a replay, whose header repeats the options."""
    told = ReplayHeader(load=options.load, options=options, **header)
    return Ledger(path, told, options.lag_budget_ms)


def record_of(request: Request, **outcome: Any) -> ReplayedRequest:
    """The record of a request; `outcome` is what is known of it by now."""
    return ReplayedRequest(
        id=f"{request.session}/{request.turn}",
        session=request.session,
        turn=request.turn,
        arrival_s=request.arrival_s,
        input_tokens=request.input_tokens,
        output_tokens=asked_output_tokens(request),
        **outcome,
    )


def asked_output_tokens(request: Request) -> int:
    """A server produces at least one token, whatever the trace has."""
    return max(1, request.output_tokens)
