# SPDX-License-Identifier: Apache-2.0
"""Open-loop load driver: send each request at its scheduled time, one record each.

    python -m microbench.driver URL PLAN OUT SUPERVISOR

PLAN is a JSON file (kvtax.load.plan), OUT a new file of records, SUPERVISOR the id of
the process below which the server is. Exit codes:
  0    every request ok, send lag within its budget
  2    a request failed, or the records could not be written
  3    no request failed, but p99 of the send lag is over its budget: run not valid
  4    no request failed, but the prefix cache was not reset as the plan asks
  64   the plan is wrong or OUT exists; nothing was sent
  130  stopped by SIGINT, 143 by SIGTERM: the rest is recorded as cancelled

The CPU time and the memory of the server are read at the edges of each hold.

Where the plan asks for it, the driver resets the prefix cache of the idle server, and
verifies the reset.
vLLM resets only when no block is in use, and up to 0.22.1 answers 200 either way. A
probe prompt is therefore cached first; after the reset it must miss. The probe leaves a
few blocks in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter_ns

import aiohttp
import msgspec
import numpy as np

from kvtax.load import allow_open_files
from kvtax.load.alarm import Alarm
from kvtax.load.client import Client, Ledger, PlanClient, Stop, open_session
from kvtax.load.plan import (
    PROBE,
    Plan,
    PlanError,
    Timetable,
    bodies,
    completion_body,
    read_plan,
    timetables,
)
from kvtax.records.requests import (
    CpuReading,
    DriverEnd,
    Phase,
    PhaseStart,
    RequestRecord,
    RequestsHeader,
)
from microbench.server_cpu import read_cpu

# Four blocks of 128 tokens, the largest default block size, and the one token that
# is always computed.
PROBE_TOKENS = 513
# A connector may hold blocks a little longer than the requests that filled them.
RESET_TIMEOUT_S = 10.0
RETRY_EVERY_S = 0.2
METRICS_TIMEOUT_S = 2.0
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


class ResetError(Exception):
    """The prefix cache was not reset, or the reset could not be verified."""


async def reset_prefix_cache(
    session: aiohttp.ClientSession, url: str, plan: Plan
) -> int:
    """Reset, and return the time (ns) of the answer to the effective reset.

    Raises ResetError after RESET_TIMEOUT_S of answers other than 200 or of resets
    that left the probe in the cache, and at once where no reset can be verified.
    """
    try:
        async with asyncio.timeout(RESET_TIMEOUT_S + plan.request_timeout_s):
            return await _verified_reset(session, url, plan)
    except TimeoutError:
        raise ResetError("the server does not answer") from None
    except aiohttp.ClientError as error:
        raise ResetError(f"{type(error).__name__}: {error}") from error


async def _verified_reset(session: aiohttp.ClientSession, url: str, plan: Plan) -> int:
    probe = _Probe(session, url, plan)
    await probe.hit_tokens()
    if not await probe.hit_tokens():
        raise ResetError(
            f"a reset cannot be verified: {probe.tokens} tokens sent twice "
            "did not hit the prefix cache (is it on, and a block no larger than that?)"
        )
    give_up_s = monotonic() + RESET_TIMEOUT_S
    while True:
        failure = await _post_reset(session, url)
        reset_ns = perf_counter_ns()
        if failure is None:
            if not await probe.hit_tokens():
                return reset_ns
            failure = "200, but what was cached still hits: blocks are in use"
        if monotonic() > give_up_s:
            raise ResetError(f"/reset_prefix_cache answered {failure}")
        await asyncio.sleep(RETRY_EVERY_S)


async def _post_reset(session: aiohttp.ClientSession, url: str) -> str | None:
    """Request a reset; return the fault in the answer, None if there is none."""
    async with session.post(f"{url}/reset_prefix_cache") as response:
        body = await response.read()
    if response.status == 404:
        raise ResetError("no /reset_prefix_cache: set VLLM_SERVER_DEV_MODE=1 there")
    if response.status != 200:
        return f"{response.status}: {body[:200].decode(errors='replace')}"
    # Later releases answer {"success": bool}.
    if body and msgspec.json.decode(body).get("success") is False:
        return "success: false"
    return None


class _Probe:
    """Prompt whose prefix-cache hits are read from /metrics."""

    def __init__(self, session: aiohttp.ClientSession, url: str, plan: Plan) -> None:
        rng = np.random.default_rng([PROBE, plan.seed])
        # No longer than what a request of the plan may grow to.
        longest = plan.prompt_tokens + plan.output_tokens - 1
        self.tokens = min(PROBE_TOKENS, longest)
        prompt = rng.integers(1, plan.vocab_size, self.tokens).tolist()
        self._body = completion_body(plan.model, prompt, 1)
        self._session = session
        self._url = url

    async def hit_tokens(self) -> int:
        """Send the probe; return how many of its tokens the server had cached."""
        before = await self._counters()
        async with self._session.post(
            f"{self._url}/v1/completions",
            data=self._body,
            headers={"Content-Type": "application/json"},
        ) as response:
            answer = await response.read()
        if response.status != 200:
            raise ResetError(f"probe failed: HTTP {response.status}: {answer[:200]!r}")
        give_up_s = monotonic() + METRICS_TIMEOUT_S
        while True:
            queries, hits = np.subtract(await self._counters(), before)
            if queries >= self.tokens:
                return int(hits)
            if monotonic() > give_up_s:
                raise ResetError(f"{QUERIES} in /metrics does not count the probe")
            await asyncio.sleep(0.01)

    async def _counters(self) -> list[float]:
        async with self._session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        lines = text.splitlines()
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith(name))
            for name in (QUERIES, HITS)
        ]


FAILED, LATE, NOT_RESET, USAGE, BY_SIGNAL = 2, 3, 4, 64, 128


def main(url: str, plan_file: str, out: str, supervisor: str) -> int:
    """Send the requests of the plan; return the exit code."""
    try:
        plan = read_plan(Path(plan_file))
        server = partial(read_cpu, int(supervisor))
        return asyncio.run(_drive(Run(url, plan, Path(out), server)))
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
LEAD_NS = 10_000_000
# Bodies built between two checks for signals.
BUILD_BATCH = 64


class Run:
    """Sends a plan's requests to `url` and records every one of them in `out`.

    All bodies are built before the first is sent, and held in memory (about 5 bytes a
    token).
    """

    ledger: Ledger

    def __init__(
        self, url: str, plan: Plan, out: Path, read_server: Callable[[], CpuReading]
    ) -> None:
        self.url = url.rstrip("/")
        self.plan = plan
        self.out = out
        self.read_server = read_server
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
                reset: tuple[int, ...] = ()
                if stretch[0].phase.reset_prefix_cache:
                    probe_ns = perf_counter_ns()
                    reset_ns = await reset_prefix_cache(session, self.url, self.plan)
                    reset = reset_ns, probe_ns
                await asyncio.sleep(stretch[0].phase.pause_s)
                await self._send_stretch(client, stretch, reset, ids)
                if _holds(stretch[-1]):
                    self.ledger.append(self.read_server())

    async def _send_stretch(
        self,
        client: Client[RequestRecord],
        stretch: list[Timetable],
        reset: tuple[int, ...],
        ids: Iterator[int],
    ) -> None:
        """Send phases back to back; return when nothing is in flight any more.

        `reset` are the times of the reset before them and of its first probe, if any.
        """
        start_ns = perf_counter_ns() + LEAD_NS
        with Alarm() as alarm:
            async with asyncio.TaskGroup() as group:
                for timetable in stretch:
                    phase, due_ns, length_ns = timetable
                    self.ledger.append(PhaseStart(phase.name, start_ns, *reset))
                    if _holds(timetable):
                        await alarm.sleep_until(start_ns)
                        self.ledger.append(self.read_server())
                    for due in due_ns:
                        record = self._records[id_ := next(ids)]
                        record.intended_ns = start_ns + due
                        await alarm.sleep_until(record.intended_ns)
                        request = self._request(
                            client, record, self._bodies[id_], not phase.after_answers
                        )
                        group.create_task(request)
                    start_ns += length_ns
                    reset = ()

    async def _request(
        self,
        client: Client[RequestRecord],
        record: RequestRecord,
        body: bytes,
        on_time: bool,
    ) -> None:
        self.in_flight += 1
        try:
            await client.request(record, body, {"X-Request-Id": str(record.id)})
        finally:
            self.in_flight -= 1
            self.ledger.add(record, on_time)


def _holds(timetable: Timetable) -> bool:
    return Phase.of(timetable.phase.name) is Phase.HOLD


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
