# SPDX-License-Identifier: Apache-2.0
"""One replay from its first record to its last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque
from concurrent.futures import Future
from itertools import groupby, islice, pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from fleet.replay.bodies import AHEAD_NS, Bodies, ready
from fleet.replay.client import ReplayClient
from fleet.replay.options import Options
from fleet.replay.preflight import check_lengths, check_vocabulary, find_model
from fleet.replay.records import new_ledger, record_of
from fleet.replay.sessions import Session
from fleet.replay.slots import Slots
from fleet.replay.window import steady_window
from lab.load.alarm import Alarm
from lab.load.client import open_session
from lab.load.ledger import Ledger
from lab.load.open_files import allow_open_files
from lab.load.stop import Stop
from lab.records.replay import ReplayedRequest, ReplayEnd, Steady

# From the decision to start to the first request.
LEAD_NS = 50_000_000
# Sessions that arrive within this are prepared in one go.
BATCH_NS = 20_000_000
# Bodies are made this much less than AHEAD_NS ahead. Else, at a constant rate, bodies
# would be made at the very moments when others are due.
OFFBEAT_NS = 5_000_000

Next = tuple[Session, Future[bytes]]  # and the body of its first turn


class Replay:
    """Sends the sessions of a trace and records every request of them in `out`.

    A session whose turn failed ends there, its remaining turns are recorded as
    cancelled: they would continue a conversation that did not take place.
    """

    records: Ledger
    _alarm: Alarm
    _bodies: Bodies
    _client: ReplayClient

    def __init__(self, options: Options, sessions: list[Session], out: Path) -> None:
        self.options = options
        self.sessions = sessions
        self.scheduled = sum(len(session.turns) for session in sessions)
        self.out = out
        self.stop = Stop()
        self.in_flight = 0
        self.slots = Slots(options.max_inflight_sessions)

    async def execute(self, **header: Any) -> ReplayEnd:
        """Run to the end, or to SIGINT or SIGTERM; return the end line.

        Raises ReplayError if it cannot begin, FileExistsError if `out` exists, OSError
        if it cannot be written.
        """
        url = self.options.url
        check_vocabulary(self.sessions, self.options.vocab_size)
        async with open_session() as http:
            model = await find_model(http, url, self.options.model)
            check_lengths(self.sessions, model)
            self._client = ReplayClient(http, url, self.options.timeout_s)
            header |= {"model": model.id, "max_model_len": model.max_model_len}
            header |= {"scheduled": self.scheduled, "sessions": len(self.sessions)}
            allow_open_files()
            with (
                Bodies(model.id, self.options.vocab_size) as self._bodies,
                Alarm() as self._alarm,
                new_ledger(self.out, self.options, **header) as self.records,
            ):
                return await self._recorded()

    async def _recorded(self) -> ReplayEnd:
        """Play everything and close the records, however the playing ends."""
        work = asyncio.create_task(self._play_all())
        self.stop.cancels(work)
        flushing = asyncio.create_task(self.records.flush_forever())
        flushing.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            pass  # what was not sent or not answered is recorded below
        finally:
            for session in self.sessions:
                self._cancel_rest(session, ReplayClient.stopped)
        flushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flushing
        spans = [(session.begin_ns, session.end_ns) for session in self.sessions]
        warmup_ns = int(self.options.warmup_s * 1e9)
        stopped = self.stop.received is not None
        window = None if stopped else steady_window(spans, warmup_ns)
        return self.records.end(
            ReplayEnd,
            steady=window and Steady(*window),
            held_sessions=self.slots.held,
            held_s_max=self.slots.held_ns_max / 1e9,
            replay_cpu_s=self.records.cpu_s,
        )

    async def _play_all(self) -> None:
        # The trace stays: a full collection need not walk it while we send.
        gc.freeze()
        if self.options.closed_loop:
            await self._play_closed_loop(self.options.max_inflight_sessions)
        else:
            await self._play_open_loop()

    async def _play_open_loop(self) -> None:
        """Begin every session when it arrives, or when it then gets a slot."""
        origin_s = self.sessions[0].turns[0].arrival_s
        arrivals = [
            (self._scaled_ns(session.turns[0].arrival_s - origin_s), session)
            for session in self.sessions
        ]
        # What is due soon is prepared before the start, the rest batch by batch.
        groups = groupby(arrivals, lambda item: max(AHEAD_NS, item[0]) // BATCH_NS)
        first, *batches = (list(batch) for _, batch in groups)
        nexts: asyncio.Queue[Next] = asyncio.Queue()

        def prepare(batch: list[tuple[int, Session]]) -> list[Future[bytes]]:
            prepared = self._prepare([session for _, session in batch])
            for item in prepared:
                nexts.put_nowait(item)
            return [body for _, body in prepared]

        async def prepare_ahead() -> None:
            for batch in batches:
                ahead_ns = AHEAD_NS - OFFBEAT_NS
                await self._alarm.sleep_until(start_ns + batch[0][0] - ahead_ns)
                prepare(batch)

        start_ns = await self._start(prepare(first))
        async with asyncio.TaskGroup() as group:
            group.create_task(prepare_ahead())
            for after_ns, _ in arrivals:
                session, body = await nexts.get()
                await self._alarm.sleep_until(start_ns + after_ns)
                due_ns = await self.slots.take(start_ns + after_ns)
                group.create_task(self._play_in_slot(session, body, due_ns))

    async def _play_in_slot(
        self, session: Session, body: Future[bytes], due_ns: int
    ) -> None:
        self.slots.leave(await self._play(session, body, due_ns))

    async def _play_closed_loop(self, slots: int) -> None:
        """Keep `slots` sessions in flight for as long as there are any."""
        waiting = iter(self.sessions)
        nexts = deque(self._prepare(list(islice(waiting, slots))))

        async def play_slot(due_ns: int) -> None:
            while nexts:
                session, body = nexts.popleft()
                nexts.extend(self._prepare(list(islice(waiting, 1))))
                due_ns = await self._play(session, body, due_ns)

        start_ns = await self._start([body for _, body in nexts])
        async with asyncio.TaskGroup() as group:
            for _ in range(slots):
                group.create_task(play_slot(start_ns))

    def _prepare(self, sessions: list[Session]) -> list[Next]:
        bodies = self._bodies.prepare([session.turns[0] for session in sessions])
        return list(zip(sessions, bodies, strict=True))

    async def _start(self, bodies: list[Future[bytes]]) -> int:
        """When the replay starts: shortly after these bodies are ready."""
        for body in bodies:
            await ready(body)
        return perf_counter_ns() + LEAD_NS

    async def _play(self, session: Session, body: Future[bytes], due_ns: int) -> int:
        """Send the turns of a session, each when it is due. Returns the last end_ns."""
        for turn, following in pairwise([*session.turns, None]):
            record = record_of(turn, intended_ns=due_ns)
            await self._alarm.sleep_until(due_ns)
            payload = await ready(body)
            think_ns = following and self._scaled_ns(following.think_s)
            soon = following is not None and think_ns <= AHEAD_NS
            if soon:
                (body,) = self._bodies.prepare([following])
            await self._send(session, record, payload)
            del payload  # not in memory for the think time
            if record.status != "ok":
                self._cancel_rest(session, f"turn {turn.turn} failed")
                return record.end_ns
            if following is None:
                break
            due_ns = record.end_ns + think_ns
            if not soon:
                del body
                await self._alarm.sleep_until(due_ns - AHEAD_NS)
                (body,) = self._bodies.prepare([following])
        return record.end_ns

    async def _send(
        self, session: Session, record: ReplayedRequest, body: bytes
    ) -> None:
        if session.begin_ns is None:
            session.begin_ns = record.intended_ns
        self.in_flight += 1
        try:
            await self._client.send(record, body)
        finally:
            self.in_flight -= 1
            session.recorded += 1
            session.end_ns = record.end_ns
            self.records.add(record)

    def _cancel_rest(self, session: Session, reason: str) -> None:
        for request in session.unrecorded:
            self.records.add(record_of(request, status="cancelled", error=reason))
        session.recorded = len(session.turns)

    def _scaled_ns(self, seconds: float) -> int:
        return int(seconds / self.options.time_scale * 1e9)
