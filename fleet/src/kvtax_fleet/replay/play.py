# SPDX-License-Identifier: Apache-2.0
"""The schedule of a replay: it sends each turn of each session when it is due.

The clock, the bodies and the sending are a Link's: over HTTP in real time
(replayer.py), or to a fleet in virtual time. No code here reads another clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import chain, groupby, islice, zip_longest
from typing import Any, Protocol

from kvtax.load.client import Ledger
from kvtax.records.requests import ReplayedRequest, ReplayEnd, Steady

from kvtax_fleet.replay.options import Options
from kvtax_fleet.replay.sessions import STOPPED, Session, record_of, steady_window
from kvtax_fleet.trace import Request

# Time from making a body to sending it. Bodies that are due later take no memory yet.
AHEAD_NS = 1_000_000_000
# Time from the decision to start to the first request.
LEAD_NS = 50_000_000
# Sessions that arrive within this time are prepared together.
BATCH_NS = 20_000_000
# Bodies are made this much less than AHEAD_NS ahead. Else, at a constant rate, bodies
# would be made at the very moments when others are due.
OFFBEAT_NS = 5_000_000


class Link(Protocol):
    """The connection to the server under load, and the clock of that load."""

    def now_ns(self) -> int: ...

    async def sleep_until(self, due_ns: int) -> None:
        """Return at `due_ns`, at once if that has passed."""

    def prepare(self, requests: list[Request]) -> list[Future[Any]]:
        """Begin to make the requests' bodies."""

    async def send(self, record: ReplayedRequest, body: Any) -> None:
        """Fill in the record to its end, whatever happens."""


Bodies = deque[Future[Any]]  # of a session's next turns
Next = tuple[Session, Bodies]


class Player:
    """The play of a trace: sends its sessions, and records every request.

    A session whose turn failed ends there; its remaining turns are recorded as
    cancelled, as they would continue a conversation that did not take place.

    The trace begins with the first of `sessions`.
    """

    def __init__(
        self,
        options: Options,
        sessions: list[Session],
        link: Link,
        records: Ledger,
    ) -> None:
        self._origin_s = sessions[0].turns[0].arrival_s
        self._start_ns = 0
        self._options = options
        self._sessions = sessions
        self._link = link
        self._records = records
        # More slots than sessions would be never used.
        most = options.max_inflight_sessions
        self._most = None if most is None else min(most, len(sessions))
        self._slots = Slots(self._most)
        self.in_flight = 0

    async def play(self) -> None:
        """Send all sessions."""
        if self._options.closed_loop:
            assert self._most is not None
            await self._play_closed_loop(self._most)
        else:
            await self._play_open_loop()

    def cancel_rest(self) -> None:
        """Record requests as cancelled that were not sent or not answered."""
        for session in self._sessions:
            self._cancel_rest(session, STOPPED)

    def end(self, stopped: bool = False, **more: Any) -> ReplayEnd:
        """Write and return the last line; `stopped`: before the end of the trace."""
        spans = [
            (session.begin_ns, session.end_ns)
            for session in self._sessions
            if session.begin_ns is not None and session.end_ns is not None
        ]
        window = None if stopped else steady_window(spans)
        return self._records.end(
            ReplayEnd,
            steady=window and Steady(*window),
            held_sessions=self._slots.held,
            held_s_max=self._slots.held_ns_max / 1e9,
            **more,
        )

    async def _play_open_loop(self) -> None:
        """Begin every session when it arrives, or when it then gets a slot."""
        arrivals = [
            (self._scaled_ns(session.turns[0].arrival_s - self._origin_s), session)
            for session in self._sessions
        ]
        # What is due soon is prepared before the start, the rest batch by batch.
        groups = groupby(arrivals, lambda item: max(AHEAD_NS, item[0]) // BATCH_NS)
        first, *batches = (list(batch) for _, batch in groups)
        nexts: asyncio.Queue[Next] = asyncio.Queue()

        def prepare(batch: list[tuple[int, Session]]) -> list[Future[Any]]:
            prepared = self._prepare([session for _, session in batch])
            for item in prepared:
                nexts.put_nowait(item)
            return _bodies(prepared)

        async def prepare_ahead() -> None:
            for batch in batches:
                ahead_ns = AHEAD_NS - OFFBEAT_NS
                await self._link.sleep_until(start_ns + batch[0][0] - ahead_ns)
                prepare(batch)

        self._start_ns = start_ns = await self._start(prepare(first))
        async with asyncio.TaskGroup() as group:
            group.create_task(prepare_ahead())
            for after_ns, _ in arrivals:
                session, bodies = await nexts.get()
                await self._link.sleep_until(start_ns + after_ns)
                due_ns = await self._slots.take(start_ns + after_ns)
                group.create_task(self._play_in_slot(session, bodies, due_ns))

    async def _play_in_slot(
        self, session: Session, bodies: Bodies, due_ns: int
    ) -> None:
        self._slots.leave(await self._play(session, bodies, due_ns))

    async def _play_closed_loop(self, slots: int) -> None:
        """Keep `slots` sessions in flight for as long as there are any."""
        waiting = iter(self._sessions)
        # All slots begin at one moment. To make second turns then would delay sending.
        nexts = deque(self._prepare(list(islice(waiting, slots)), turns=2))

        async def play_slot(due_ns: int) -> None:
            while nexts:
                session, bodies = nexts.popleft()
                nexts.extend(self._prepare(list(islice(waiting, 1))))
                due_ns = await self._play(session, bodies, due_ns)

        start_ns = await self._start(_bodies(nexts))
        async with asyncio.TaskGroup() as group:
            for _ in range(slots):
                group.create_task(play_slot(start_ns))

    def _prepare(self, sessions: list[Session], turns: int = 1) -> list[Next]:
        firsts = [session.turns[:turns] for session in sessions]
        made = iter(self._link.prepare(list(chain.from_iterable(firsts))))
        bodies = [deque(islice(made, len(first))) for first in firsts]
        return list(zip(sessions, bodies, strict=True))

    async def _start(self, bodies: list[Future[Any]]) -> int:
        for body in bodies:
            await ready(body)
        return self._link.now_ns() + LEAD_NS

    async def _play(self, session: Session, bodies: Bodies, due_ns: int) -> int:
        """Send the turns of a session, each when it is due. Returns the last end_ns."""
        end_ns = due_ns
        for turn, following in zip_longest(session.turns, session.turns[1:]):
            record = record_of(turn, intended_ns=due_ns)
            await self._link.sleep_until(due_ns)
            payload = await ready(bodies.popleft())
            if not bodies and following is not None:
                now_ns = self._link.now_ns()
                if self._due_ns(following, now_ns) <= now_ns + AHEAD_NS:
                    bodies.extend(self._link.prepare([following]))
            await self._send(session, record, payload)
            del payload  # not in memory for the think time
            assert record.end_ns is not None
            end_ns = record.end_ns
            if record.status != "ok":
                self._cancel_rest(session, f"turn {turn.turn} failed")
            if record.status != "ok" or following is None:
                break
            due_ns = self._due_ns(following, end_ns)
            if not bodies:
                await self._link.sleep_until(due_ns - AHEAD_NS)
                bodies.extend(self._link.prepare([following]))
        return end_ns

    def _due_ns(self, turn: Request, answered_ns: int) -> int:
        if not self._options.trace_times:
            return answered_ns + self._scaled_ns(turn.think_s or 0)
        after_ns = self._scaled_ns(turn.arrival_s - self._origin_s)
        return max(answered_ns, self._start_ns + after_ns)

    async def _send(self, session: Session, record: ReplayedRequest, body: Any) -> None:
        if session.begin_ns is None:
            session.begin_ns = record.intended_ns
        self.in_flight += 1
        try:
            await self._link.send(record, body)
        finally:
            self.in_flight -= 1
            session.recorded += 1
            session.end_ns = record.end_ns
            self._records.add(record)

    def _cancel_rest(self, session: Session, reason: str) -> None:
        for request in session.unrecorded:
            self._records.add(record_of(request, status="cancelled", error=reason))
        session.recorded = len(session.turns)

    def _scaled_ns(self, seconds: float) -> int:
        return int(seconds / self._options.time_scale * 1e9)


def _bodies(nexts: Iterable[Next]) -> list[Future[Any]]:
    return [body for _, bodies in nexts for body in bodies]


async def ready(body: Future[Any]) -> Any:
    """Return the body; wait for it if it is not made yet."""
    return body.result() if body.done() else await asyncio.wrap_future(body)


class Slots:
    """Slots of sessions in flight: at most `limit`, None for any number.

    `held` sessions had to wait for a slot, the longest for `held_ns_max`.
    """

    def __init__(self, limit: int | None) -> None:
        self.held = 0
        self.held_ns_max = 0
        self._limited = limit is not None
        # Times at which the free slots became free.
        self._free_ns: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(limit or 0):
            self._free_ns.put_nowait(0)

    async def take(self, arrived_ns: int) -> int:
        """Wait for a slot; return when the session is due: `arrived_ns`, or later."""
        if not self._limited:
            return arrived_ns
        due_ns = max(arrived_ns, await self._free_ns.get())
        if due_ns > arrived_ns:
            self.held += 1
            self.held_ns_max = max(self.held_ns_max, due_ns - arrived_ns)
        return due_ns

    def leave(self, ended_ns: int) -> None:
        """Give back the slot of a session that ended at `ended_ns`."""
        self._free_ns.put_nowait(ended_ns)
