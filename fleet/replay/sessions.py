# SPDX-License-Identifier: Apache-2.0
"""The sessions of a trace: the turns that wait for each other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, pairwise

from fleet.replay.options import ReplayError
from fleet.trace import Request


class Session:
    """Turns in order. `recorded` of them have their terminal record.

    `begin_ns` is when the first turn was due, `end_ns` when the last one that was sent
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
        return self.turns[self.recorded :]


def group(requests: Iterable[Request], limit: int | None = None) -> list[Session]:
    """The sessions of the first `limit` requests, in order of their first arrival.

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


def share_of(sessions: list[Session], share: tuple[int, int] | None) -> list[Session]:
    """Those that are dealt to one of several replayers; all without a share.

    Raises ReplayError if that is none.
    """
    if share is None:
        return sessions
    number, replayers = share
    if not (own := sessions[number::replayers]):
        raise ReplayError(
            f"{len(sessions)} sessions cannot be shared by {replayers} replayers: "
            "take fewer"
        )
    return own


def _check(session: Session) -> None:
    for before, turn in pairwise(session.turns):
        where = f"session {session.name!r}, turn {turn.turn}"
        if turn.turn <= before.turn:
            raise ReplayError(f"{where}: comes after turn {before.turn}")
        if turn.think_s is None:
            raise ReplayError(
                f"{where}: has no think_s, so it is not known when it is due after the "
                "answer to the turn before"
            )
