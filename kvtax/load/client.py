# SPDX-License-Identifier: Apache-2.0
"""Send requests over HTTP, read their streams, and keep the account of a run."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

import aiohttp
import numpy as np
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import BytesPayload

from kvtax.load.plan import Plan
from kvtax.load.sse import CompletionStream, StreamError, Usage
from kvtax.records.files import LineFile
from kvtax.records.requests import (
    Account,
    ReplayHeader,
    RequestOutcome,
    RequestRecord,
    RequestsHeader,
)
from kvtax.signals import heeded

Kind = TypeVar("Kind", bound=RequestOutcome)

# Below the 5 s after which vLLM closes an idle connection: a request that meets the
# close half-way would fail for no fault of the server.
KEEPALIVE_S = 2.0


def open_session() -> aiohttp.ClientSession:
    """Open a session in which no request waits for another (with TCP_NODELAY)."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class _StampedBody(BytesPayload):
    """Notes when the first byte of the body is handed to the socket."""

    def __init__(self, body: bytes, record: RequestOutcome) -> None:
        super().__init__(body, content_type="application/json")
        self._record = record

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self._record.sent_ns = perf_counter_ns()
        await super().write_with_length(writer, content_length)


class Client(Generic[Kind]):
    """Sends requests to one server and keeps a record of each, of one kind."""

    stopped = "driver stopped"  # the error of a request that is cancelled
    now_ns = staticmethod(perf_counter_ns)

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeout_s: float
    ) -> None:
        self._post = session.post
        self._url = f"{url}/v1/completions"
        self._timeout_s = timeout_s

    async def request(
        self, record: Kind, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Fill in the record to its end, whatever happens.

        Only cancellation is raised on, with the record at "cancelled".
        """
        record.status = "failed"
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(record, body, headers)
            record.status = "ok"
        except TimeoutError:
            record.error = f"no complete answer within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.status = "cancelled"
            record.error = self.stopped
            raise
        except StreamError as error:
            record.error = str(error)
        except Exception as error:  # every request ends in a record
            record.error = f"{type(error).__name__}: {error}"
        finally:
            if record.status != "ok":
                record.end_ns = self.now_ns()

    def take_head(self, record: Kind, response: aiohttp.ClientResponse) -> None:
        """Note what the response's head says."""
        record.http_status = response.status

    def take_usage(self, record: Kind, usage: Usage) -> None:
        """Note the server's token counts. Raises StreamError if they are wrong."""
        raise NotImplementedError

    def take_end(self, record: Kind, stream: CompletionStream) -> None:
        """Note how the stream ended. Raises StreamError unless it ended well."""
        usage = stream.usage()
        record.end_ns = stream.last_token_ns
        self.take_usage(record, usage)

    async def _exchange(
        self, record: Kind, body: bytes, headers: dict[str, str] | None
    ) -> None:
        stream = CompletionStream()
        payload = _StampedBody(body, record)
        async with self._post(self._url, data=payload, headers=headers) as response:
            self.take_head(record, response)
            if response.status != 200:
                text = (await response.content.read(500)).decode(errors="replace")
                raise StreamError(f"HTTP {response.status}: {text}")
            try:
                async for piece in response.content.iter_any():
                    stream.feed(piece, perf_counter_ns())
            finally:
                record.first_token_ns = stream.first_token_ns
        self.take_end(record, stream)


class PlanClient(Client[RequestRecord]):
    """Sends the requests of one plan."""

    def __init__(self, session: aiohttp.ClientSession, url: str, plan: Plan) -> None:
        super().__init__(session, url, plan.request_timeout_s)
        self._shapes = {phase.name: plan.shape(phase) for phase in plan.phases}

    def take_usage(self, record: RequestRecord, usage: Usage) -> None:
        record.output_tokens = usage.completion_tokens
        usage.check(*self._shapes[record.phase])


class Stop:
    """Cancels a task at SIGINT or SIGTERM; `received` is the one that came, or None."""

    received: signal.Signals | None = None

    def cancels(self, work: asyncio.Task[None]) -> None:
        """Cancel `work` at a signal, for as long as the running loop is there."""
        loop = asyncio.get_running_loop()
        for signum in heeded((signal.SIGINT, signal.SIGTERM)):
            loop.add_signal_handler(signum, self._came, signum, work)

    def _came(self, signum: signal.Signals, work: asyncio.Task[None]) -> None:
        self.received = signum
        work.cancel()


End = TypeVar("End", bound=Account)


class Ledger(LineFile):
    """Writes `path`, which must not exist yet (FileExistsError).

    `flush_forever` and `end` raise OSError if the records cannot be written.
    """

    def __init__(
        self, path: Path, header: RequestsHeader | ReplayHeader, lag_budget_ms: float
    ) -> None:
        super().__init__(path, header)
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0}
        self._scheduled = header.scheduled
        self._lag_budget_ms = lag_budget_ms
        self._lag_ms: list[float] = []
        self._cpu_start_s = time.process_time()

    def begin(self) -> None:
        """Count CPU time from now on: what came before was preparation."""
        self._cpu_start_s = time.process_time()

    @property
    def cpu_s(self) -> float:
        """CPU time of this process since it began, in all its threads."""
        return round(time.process_time() - self._cpu_start_s, 6)

    def add(self, record: RequestOutcome, on_time: bool = True) -> None:
        """Record how a request ended. Call it once for each.

        Its lag counts if it was to be sent `on_time`.
        """
        if record.status is None:
            raise RuntimeError("a request is recorded that has not ended")
        self.counts[record.status] += 1
        if on_time and record.sent_ns is not None:
            if record.intended_ns is None:
                raise RuntimeError("a request was sent that was never due")
            self._lag_ms.append((record.sent_ns - record.intended_ns) / 1e6)
        self.append(record)

    def end(self, kind: type[End], **more: Any) -> End:
        """Write and return the last line. Without a sent request no run is valid."""
        lag_ms = lag_summary(self._lag_ms)
        line = kind(
            scheduled=self._scheduled,
            **self.counts,
            lag_ms=lag_ms,
            lag_budget_ms=self._lag_budget_ms,
            valid=lag_ms is not None and lag_ms["p99"] <= self._lag_budget_ms,
            **more,
        )
        self.append(line)
        self.flush().result()
        return line


def lag_summary(lag_ms: list[float]) -> dict[str, float] | None:
    """p50, p90, p99 and max of the lag, None without any."""
    if not lag_ms:
        return None
    p50, p90, p99 = np.percentile(lag_ms, [50, 90, 99]).round(3).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": round(max(lag_ms), 3)}
