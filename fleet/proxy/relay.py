# SPDX-License-Identifier: Apache-2.0
"""An instance's answer to the client, byte for byte.

The event stream is not parsed: the first chunk is the first token, events are counted
by their `data:`, and what a stream must end with is looked for in its last bytes. A
stream that breaks off, or ends without [DONE], ends for the client with an error event
and without [DONE]; so does one that is cancelled because the proxy stops. A client that
takes nothing for too long is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic_ns

import msgspec
from aiohttp import web

from .exchange import Exchange
from .upstream import ERROR_EVENT, Answer, Failure

STOPPED = "the proxy was stopped"
_DONE = b"[DONE]"
_TAIL = 16


class ClientStalled(ConnectionResetError):
    """The client has stopped reading, and its connection has been ended."""


async def relay(
    exchange: Exchange,
    answer: Answer,
    client_timeout_s: float,
    stopping: Callable[[], bool],
) -> web.StreamResponse:
    """Send `answer` on and note in the exchange's end line how it went.

    Raises ConnectionResetError if the client is gone, or takes nothing for longer than
    `client_timeout_s` (ClientStalled).
    """
    end, headers = exchange.end, answer.headers
    headers["X-Kvtax-Instance"] = end.instance
    if end.prefill_instance is not None:
        headers["X-Kvtax-Prefill"] = end.prefill_instance
    end.http_status = answer.status
    end.first_byte_ns = monotonic_ns()
    exchange.flight.first_token()
    if not answer.streams:
        end.status = "ok" if answer.status < 400 else "failed"
        if end.status == "failed":
            end.error = answer.first[:300].decode(errors="replace")
        return web.Response(status=answer.status, headers=headers, body=answer.first)
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(exchange.request)
    client = _Client(response, exchange.request, client_timeout_s)
    failure = None
    try:
        await _stream(client, answer, exchange)
    except Failure as error:
        end.status, failure = "failed", error
    except asyncio.CancelledError:
        if not stopping():
            raise
        end.status, failure = "proxy_stopped", Failure(502, end.instance, STOPPED)
    if failure is not None:
        end.error = str(failure)
        await client.write(error_event(failure))
        response.force_close()
    elif end.error is None:
        end.status = "ok"
    await client.end()
    return response


class _Client:
    """Takes a stream's chunks, or is cut. Its methods raise ConnectionResetError."""

    def __init__(
        self, response: web.StreamResponse, request: web.Request, timeout_s: float
    ) -> None:
        self._response = response
        self._request = request
        self._timeout_s = timeout_s

    async def write(self, chunk: bytes) -> None:
        await self._taken(self._response.write(chunk))

    async def end(self, chunk: bytes = b"") -> None:
        await self._taken(self._response.write_eof(chunk))

    async def _taken(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await writing
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            what = f"the client took nothing for {self._timeout_s:g} s"
            raise ClientStalled(what) from None


async def _stream(client: _Client, answer: Answer, exchange: Exchange) -> None:
    """Pass the chunks on as fast as the client takes them. Raises Failure.

    A last chunk that is known to be the last goes out in one write with the end.
    """
    tail, done = b"", False
    end = exchange.end
    name = end.instance
    chunk = answer.first
    while chunk:
        events = chunk.count(b"data:") - chunk.count(_DONE)
        exchange.flight.generated(events)
        end.generated_tokens += events
        joined = tail + chunk
        if ERROR_EVENT in joined:
            end.status, end.error = "failed", f"{name} sent an error event"
        tail = joined[-_TAIL:]
        done = tail.rstrip().endswith(_DONE)
        if done and answer.at_end:
            await client.end(chunk)
            return
        await client.write(chunk)
        chunk = await answer.chunk()
    if not done:
        raise Failure(502, name, f"{name} ended its answer without [DONE]")


def error_json(error: Failure) -> bytes:
    """An error as OpenAI's API gives it, with the instance that failed."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": "proxy_error",
                "code": error.status,
                "instance": error.instance,
            }
        }
    )


def error_event(error: Failure) -> bytes:
    """The same inside a stream; the blank line before it ends a torn event."""
    return b"\n\ndata: " + error_json(error) + b"\n\n"


def error_response(error: Failure) -> web.Response:
    return web.Response(
        status=error.status, body=error_json(error), content_type="application/json"
    )
