# SPDX-License-Identifier: Apache-2.0
"""Read kv-cache-tester's traces: a line is a session of a coding agent.

Nothing tells when a session began: session i begins i intervals after the first. Hash
ids mean something only in their line, so they are numbered anew for the whole trace.

`think_time` counts from the last answer whose end was recorded, which is not always
the turn before: where that has no `api_time`, what is taken is the time since it was
sent, which contains its unknown service time. Adding up `think_time` counts such gaps
more than once.

Schema: github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtax_fleet.trace.request import Count, Positive, Request, Seconds, length_problem
from kvtax_fleet.trace.trace_file import Lines

SESSION_INTERVAL_S = 60.0

LocalHash = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Call(msgspec.Struct):
    """A call of the model; or, of type "subagent", calls with times from its start."""

    t: Seconds
    type: str
    input_tokens: Count = msgspec.field(default=0, name="in")
    output_tokens: Count = msgspec.field(default=0, name="out")
    hash_ids: list[LocalHash] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    agent_id: str | None = None
    requests: list[Call] = []


class Session(msgspec.Struct):
    """A line."""

    id: str
    block_size: Positive
    hash_id_scope: str
    requests: list[Call]


class _Turn(NamedTuple):
    """A request until its time comes; ids as an array, which takes a fifth as much."""

    arrival_s: float
    order: int
    hashes: NDArray[Any]
    request: Request


_SESSION = msgspec.json.Decoder(Session)


def read(lines: Lines) -> Iterator[Request]:
    """Yield the requests of a trace in order of arrival; sub-agents are sessions, too.

    Memory: the sessions under way.

    Raises TraceError: a session is not what it says.
    """
    parser = _Parser(lines)
    waiting: list[_Turn] = []
    order = itertools.count()
    for number, session in enumerate(lines.read(_SESSION)):
        start_s = number * SESSION_INTERVAL_S
        while waiting and waiting[0].arrival_s < start_s:
            yield _due(waiting)
        for request, hashes in parser.turns(session, start_s):
            turn = _Turn(request.arrival_s, next(order), hashes, request)
            heapq.heappush(waiting, turn)
    while waiting:
        yield _due(waiting)


def _due(waiting: list[_Turn]) -> Request:
    turn = heapq.heappop(waiting)
    return msgspec.structs.replace(turn.request, hashes=turn.hashes.tolist())


class _Parser:
    """Parser of lines; checks what must agree between them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._next_id = 0  # the first that no line above has
        self._names: set[str] = set()
        self._block_tokens: int | None = None

    def turns(
        self, session: Session, start_s: float
    ) -> Iterator[tuple[Request, NDArray[Any]]]:
        """Yield the requests of a session and its sub-agents, with their ids."""
        self._check(session)
        base = self._next_id
        agents: list[tuple[str, str | None, float, Session | Call]] = [
            (session.id, None, start_s, session)
        ]
        while agents:
            name, parent, began_s, agent = agents.pop()
            if name in self._names:
                raise self._lines.error(f"session {name!r} is there twice: rename one")
            self._names.add(name)
            calls = [call for call in agent.requests if call.type != "subagent"]
            for turn, call in enumerate(calls):
                before = calls[turn - 1] if turn else None
                self._check_call(session, name, before, call)
                request = Request(
                    arrival_s=began_s + call.t,
                    session=name,
                    turn=turn,
                    input_tokens=call.input_tokens,
                    output_tokens=call.output_tokens,
                    hashes=[],
                    block_tokens=session.block_size,
                    think_s=_think_s(before, call),
                    parent=parent,
                )
                hashes = np.array(call.hash_ids, np.int64) + base
                self._next_id = max(self._next_id, int(hashes.max(initial=-1)) + 1)
                yield request, hashes
            for number, call in enumerate(agent.requests):
                if call.type == "subagent":
                    nested = f"{name}.{call.agent_id or number}"
                    agents.append((nested, name, began_s + call.t, call))

    def _check(self, session: Session) -> None:
        if session.hash_id_scope != "local":
            raise self._lines.error(
                f"hash_id_scope is {session.hash_id_scope!r}; only 'local' is known"
            )
        if self._block_tokens not in (None, session.block_size):
            raise self._lines.error(
                f"blocks of {session.block_size} tokens after blocks of "
                f"{self._block_tokens}: a trace has one block size"
            )
        self._block_tokens = session.block_size
        if not session.requests:
            raise self._lines.error("a session without requests: remove the line")

    def _check_call(
        self, session: Session, name: str, before: Call | None, call: Call
    ) -> None:
        problem = length_problem(
            len(call.hash_ids), session.block_size, call.input_tokens
        )
        if before and call.t < before.t:
            problem = f"the one before it is at {before.t} s, later: sort them"
        if call.input_tokens == 0:
            problem = "no input tokens: remove it"
        if problem:
            raise self._lines.error(
                f"session {name!r}, the request at {call.t} s: {problem}"
            )


def _think_s(before: Call | None, call: Call) -> float | None:
    if before is None:
        return None
    if before.api_time is not None and call.think_time is not None:
        return call.think_time
    return max(0.0, call.t - before.t - (before.api_time or 0.0))
