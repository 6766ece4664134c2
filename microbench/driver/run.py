# SPDX-License-Identifier: Apache-2.0
"""One run of a plan from its first record to its last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter_ns

from lab.load.alarm import Alarm
from lab.load.arrivals import Timetable, timetables
from lab.load.client import Client, PlanClient, open_session
from lab.load.ledger import Ledger
from lab.load.open_files import allow_open_files
from lab.load.plan import Plan
from lab.load.prompts import bodies
from lab.load.stop import Stop
from lab.records.requests import DriverEnd, PhaseStart, RequestRecord, RequestsHeader
from microbench.driver.reset import ResetError, reset_prefix_cache

# From the decision to start to the first request of a phase.
LEAD_NS = 50_000_000
# Bodies built between two looks at signals.
BUILD_BATCH = 64


class Run:
    """Sends a plan's requests to `url` and records every one of them in `out`.

    All bodies are built before the first is sent, and held in memory (about 5 bytes a
    token).
    """

    ledger: Ledger

    def __init__(self, url: str, plan: Plan, out: Path) -> None:
        self.url = url.rstrip("/")
        self.plan = plan
        self.out = out
        self.stop = Stop()
        self.reset_error: str | None = None
        self.in_flight = 0
        self._records = list(_records(plan))
        self._bodies: list[bytes] = []

    async def execute(self) -> DriverEnd:
        """Run to the end, or to SIGINT or SIGTERM; return the end line.

        Raises FileExistsError if `out` exists, OSError if it cannot be written.
        """
        work = asyncio.create_task(self._build_and_send())
        self.stop.cancels(work)
        header = RequestsHeader(plan=self.plan, scheduled=self.plan.scheduled)
        with Ledger(self.out, header, self.plan.lag_budget_ms) as self.ledger:
            flushing = asyncio.create_task(self.ledger.flush_forever())
            flushing.add_done_callback(lambda _: work.cancel())
            try:
                await work
            except asyncio.CancelledError:
                pass  # what was not sent or not answered is recorded below
            except ResetError as error:
                self.reset_error = f"prefix cache not reset: {error}"
            flushing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flushing
            self._cancel_unsent()
            return self.ledger.end(DriverEnd, driver_cpu_s=self.ledger.cpu_s)

    def _cancel_unsent(self) -> None:
        for record in self._records:
            if record.status is None:
                record.status = "cancelled"
                record.error = self.reset_error or "driver stopped"
                self.ledger.add(record)

    async def _build_and_send(self) -> None:
        for body in bodies(self.plan):
            self._bodies.append(body)
            if len(self._bodies) % BUILD_BATCH == 0:
                await asyncio.sleep(0)
        # Bodies and records stay: a full collection need not walk them while we send.
        gc.freeze()
        allow_open_files()
        self.ledger.begin()
        ids = count()
        async with open_session() as session:
            client = PlanClient(session, self.url, self.plan)
            for stretch in _stretches(timetables(self.plan)):
                reset_ns = None
                if stretch[0].phase.reset_prefix_cache:
                    reset_ns = await reset_prefix_cache(session, self.url, self.plan)
                await self._send_stretch(client, stretch, reset_ns, ids)

    async def _send_stretch(
        self,
        client: Client,
        stretch: list[Timetable],
        reset_ns: int | None,
        ids: Iterator[int],
    ) -> None:
        """Send phases back to back; return when nothing is in flight any more."""
        start_ns = perf_counter_ns() + LEAD_NS
        with Alarm() as alarm:
            async with asyncio.TaskGroup() as group:
                for phase, due_ns, length_ns in stretch:
                    self.ledger.append(PhaseStart(phase.name, start_ns, reset_ns))
                    for due in due_ns:
                        record = self._records[id_ := next(ids)]
                        record.intended_ns = start_ns + due
                        await alarm.sleep_until(record.intended_ns)
                        request = self._request(client, record, self._bodies[id_])
                        group.create_task(request)
                    start_ns += length_ns
                    reset_ns = None

    async def _request(
        self, client: Client, record: RequestRecord, body: bytes
    ) -> None:
        self.in_flight += 1
        try:
            await client.request(record, body, {"X-Request-Id": str(record.id)})
        finally:
            self.in_flight -= 1
            self.ledger.add(record)


def _records(plan: Plan) -> Iterator[RequestRecord]:
    ids = count()
    for phase in plan.phases:
        for _ in range(phase.requests):
            yield RequestRecord(
                id=next(ids), phase=phase.name, prompt_tokens=plan.prompt_tokens
            )


def _stretches(tables: list[Timetable]) -> list[list[Timetable]]:
    """Phases that follow each other without a pause; a reset begins a new stretch."""
    stretches: list[list[Timetable]] = []
    for table in tables:
        if not stretches or table.phase.reset_prefix_cache:
            stretches.append([])
        stretches[-1].append(table)
    return stretches
