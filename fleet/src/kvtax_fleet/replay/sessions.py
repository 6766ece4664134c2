# SPDX-License-Identifier: Apache-2.0
"""Sessions of a trace: their turns, the records of these, and the steady window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kvtax.load.client import Ledger
from kvtax.records.requests import ReplayedRequest, ReplayHeader

from kvtax_fleet.replay.options import Options, ReplayError
from kvtax_fleet.trace import Request

# Error of a request that was cancelled by the end of the replay.
STOPPED = "replay stopped"


class Session:
    """The turns of a session in order; the first `recorded` ones have their record.

    `begin_ns` is when the first turn was due, `end_ns` when the last turn that was sent
    had ended.
    """

    def __init__(self, first: Request) -> None:
        self.name = first.session
        self.turns = [first]
        self.recorded = 0
        self.begin_ns: int | None = None
        self.end_ns: int | None = None

    @property
    def unrecorded(self) -> list[Request]:
        """Turns without a record."""
        return self.turns[self.recorded :]


def group(requests: Iterable[Request], limit: int | None = None) -> list[Session]:
    """Group the first `limit` requests by session, in order of first arrival.

    Raises ReplayError for turns out of order or without a think time.
    """
    sessions: dict[str, Session] = {}
    for request in islice(requests, limit):
        if session := sessions.get(request.session):
            session.turns.append(request)
        else:
            sessions[request.session] = Session(request)
    if not sessions:
        raise ReplayError("the trace has no request")
    for session in sessions.values():
        _check(session)
    return sorted(sessions.values(), key=lambda session: session.turns[0].arrival_s)


def _check(session: Session) -> None:
    for before, turn in pairwise(session.turns):
        where = f"session {session.name!r}, turn {turn.turn}"
        if turn.turn <= before.turn:
            raise ReplayError(f"{where}: comes after turn {before.turn}")
        if turn.think_s is None:
            raise ReplayError(
                f"{where}: has no think_s, the time from the answer to the turn before "
                "until it is due: replay a trace that has it"
            )


def new_ledger(path: Path, options: Options, **header: Any) -> Ledger:
    """Open the ledger of a replay, whose header repeats the options."""
    first = ReplayHeader(load=options.load, options=options, **header)
    return Ledger(path, first, options.lag_budget_ms)


def record_of(request: Request, **outcome: Any) -> ReplayedRequest:
    """Make the record of a request with the fields of its outcome that are known."""
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
    """Return the answer's tokens; a server produces at least one."""
    return max(1, request.output_tokens)


class Window(NamedTuple):
    """The steady part of a load: from `start_ns` to before `end_ns`."""

    start_ns: int
    end_ns: int


def steady_window(spans: Sequence[tuple[int, int]]) -> Window | None:
    """Find when the load was steady: neither rising nor running out.

    Sessions are given as (begin_ns, end_ns > begin_ns). The number in flight rises at
    the beginning and falls once no session is left to replace one that ends. Steady is
    from the moment it first reaches its mean until the first session ends after the
    last one has begun; the mean is over the time from the first beginning to that end.
    The rule is the same in an open loop, where sessions arrive, and in a closed loop,
    where they begin together. None if nothing is left.
    """
    if not spans:
        return None
    begins, ends = np.array(spans, np.int64).T
    # Skip the session that the last one replaced: it ended when that one began.
    end_ns = int(ends[ends > begins.max()].min())
    # In flight after each change; the end comes first where another begins with it.
    moments = np.concatenate([begins, ends])
    changes = np.concatenate([np.ones_like(begins), -np.ones_like(ends)])
    order = np.lexsort((changes, moments))
    moments, in_flight = moments[order], np.cumsum(changes[order])
    inside = moments < end_ns
    moments, in_flight = moments[inside], in_flight[inside]
    lengths_ns = np.diff(np.append(moments, end_ns))
    mean = (in_flight * lengths_ns).sum() / lengths_ns.sum()
    start_ns = int(moments[np.argmax(in_flight >= mean)])
    return Window(start_ns, end_ns) if start_ns < end_ns else None
