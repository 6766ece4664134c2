# SPDX-License-Identifier: Apache-2.0
"""One request over HTTP: send it, read its stream, say how it ended."""

from __future__ import annotations

import asyncio
from time import perf_counter_ns

import aiohttp
from aiohttp.payload import BytesPayload

from microbench.driver.ledger import Record
from microbench.driver.plan import Plan
from microbench.driver.sse import CompletionStream, StreamError

# Below the 5 s after which vLLM closes an idle connection: a request that meets the
# close half-way would fail for no fault of the server.
KEEPALIVE_S = 2.0


def open_session() -> aiohttp.ClientSession:
    """A session in which no request waits for another (aiohttp sets TCP_NODELAY)."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class _StampedBody(BytesPayload):
    """Notes when the first byte of the body is handed to the socket."""

    def __init__(self, body: bytes, record: Record) -> None:
        super().__init__(body, content_type="application/json")
        self._record = record

    async def write_with_length(self, writer, content_length) -> None:
        self._record.sent_ns = perf_counter_ns()
        await super().write_with_length(writer, content_length)


class Client:
    """Sends the requests of one plan to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, plan: Plan) -> None:
        self._post = session.post
        self._url = f"{url}/v1/completions"
        self._plan = plan

    async def request(self, record: Record, body: bytes) -> None:
        """Fill in the record to its end, whatever happens.

        Only cancellation is raised on, with the record at "cancelled".
        """
        record.status = "failed"
        timeout_s = self._plan.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(record, body)
            record.status = "ok"
        except TimeoutError:
            record.error = f"no complete answer within {timeout_s:g} s"
        except asyncio.CancelledError:
            record.status = "cancelled"
            record.error = "driver stopped"
            raise
        except StreamError as error:
            record.error = str(error)
        except Exception as error:  # every request ends in a record
            record.error = f"{type(error).__name__}: {error}"
        finally:
            if record.status != "ok":
                record.end_ns = perf_counter_ns()

    async def _exchange(self, record: Record, body: bytes) -> None:
        stream = CompletionStream()
        async with self._post(self._url, data=_StampedBody(body, record)) as response:
            record.http_status = response.status
            if response.status != 200:
                text = (await response.content.read(500)).decode(errors="replace")
                raise StreamError(f"HTTP {response.status}: {text}")
            try:
                async for piece in response.content.iter_any():
                    stream.feed(piece, perf_counter_ns())
            finally:
                record.first_token_ns = stream.first_token_ns
        usage = stream.usage()
        record.output_tokens = usage.completion_tokens
        record.end_ns = stream.last_token_ns
        asked = self._plan.prompt_tokens, self._plan.output_tokens
        if (usage.prompt_tokens, usage.completion_tokens) != asked:
            raise StreamError(
                f"asked for {asked[0]} prompt and {asked[1]} output tokens, usage says "
                f"{usage.prompt_tokens} and {usage.completion_tokens}"
            )
