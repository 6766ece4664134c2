# SPDX-License-Identifier: Apache-2.0
"""Open-loop load driver: send each request at its scheduled time, one record each.

    python -m microbench.driver URL PLAN OUT

PLAN is a JSON file (kvtax.load.plan), OUT a new file of records. Exit codes:
  0    every request ok, send lag within its budget
  2    a request failed, or the records could not be written
  3    no request failed, but p99 of the send lag is over its budget: run not valid
  4    no request failed, but the prefix cache was not reset as the plan asks
  64   the plan is wrong or OUT exists; nothing was sent
  130  stopped by SIGINT, 143 by SIGTERM: the rest is recorded as cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter_ns

from kvtax.load import allow_open_files
from kvtax.load.alarm import Alarm
from kvtax.load.client import Client, Ledger, PlanClient, Stop, open_session
from kvtax.load.plan import Plan, PlanError, Timetable, bodies, read_plan, timetables
from kvtax.records.requests import DriverEnd, PhaseStart, RequestRecord, RequestsHeader
from microbench.cache_reset import ResetError, reset_prefix_cache

FAILED, LATE, NOT_RESET, USAGE, BY_SIGNAL = 2, 3, 4, 64, 128


def main(url: str, plan_file: str, out: str) -> int:
    """Send the requests of the plan; return the exit code."""
    try:
        return asyncio.run(_drive(Run(url, read_plan(Path(plan_file)), Path(out))))
    except PlanError as error:
        return _fail(USAGE, str(error))
    except FileExistsError:
        return _fail(USAGE, f"{out} exists; records are never overwritten")
    except OSError as error:
        return _fail(FAILED, str(error))


async def _drive(run: Run) -> int:
    """Run the plan; print on stderr what went wrong, and return the worst exit code."""
    end = await run.execute()
    if (signum := run.stop.received) is not None:
        done = f"{end.ok} ok, {end.failed} failed, {end.cancelled} cancelled"
        return _fail(BY_SIGNAL + signum, f"stopped by {signum.name}: {done}")
    status = 0
    if not end.valid and end.lag_ms is not None:
        status = _fail(
            LATE,
            f"RUN NOT VALID: requests were sent late, lag {end.lag_ms} ms, "
            f"budget for p99 {end.lag_budget_ms:g} ms",
        )
    if run.reset_error is not None:
        status = _fail(NOT_RESET, run.reset_error)
    if end.failed:
        status = _fail(FAILED, f"{end.failed} of {end.scheduled} requests failed")
    return status


def _fail(status: int, message: str) -> int:
    print(f"driver: {message}", file=sys.stderr)
    return status


# Nanoseconds from the decision to start a phase to its first request.
LEAD_NS = 50_000_000
# Bodies built between two checks for signals.
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
                        request = self._request(
                            client, record, self._bodies[id_], not phase.after_answers
                        )
                        group.create_task(request)
                    start_ns += length_ns
                    reset_ns = None

    async def _request(
        self, client: Client, record: RequestRecord, body: bytes, on_time: bool
    ) -> None:
        self.in_flight += 1
        try:
            await client.request(record, body, {"X-Request-Id": str(record.id)})
        finally:
            self.in_flight -= 1
            self.ledger.add(record, on_time)


def _records(plan: Plan) -> Iterator[RequestRecord]:
    ids = count()
    for phase in plan.phases:
        for _ in range(phase.requests):
            yield RequestRecord(
                id=next(ids),
                phase=phase.name,
                prompt_tokens=plan.shape(phase)[0],
            )


def _stretches(tables: list[Timetable]) -> list[list[Timetable]]:
    """Group the phases that follow each other without a pause."""
    stretches: list[list[Timetable]] = []
    for table in tables:
        phase = table.phase
        if not stretches or phase.after_answers or phase.reset_prefix_cache:
            stretches.append([])
        stretches[-1].append(table)
    return stretches


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
