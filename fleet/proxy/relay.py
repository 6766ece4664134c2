# SPDX-License-Identifier: Apache-2.0
"""An instance's answer to the client, byte for byte.

The event stream is not parsed: the first chunk is the first token, events are counted
by their `data:`, and what a stream must end with is looked for in its last bytes. A
stream that breaks off, or ends without [DONE], ends for the client with an error event
and without [DONE]; so does one that is cancelled because the proxy stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns

import aiohttp
import msgspec
from aiohttp import web

from .exchange import Exchange
from .upstream import ERROR_EVENT, Answer, Failure

STOPPED = "the proxy was stopped"
_DONE = b"[DONE]"
_TAIL = 16


async def relay(
    exchange: Exchange, answer: Answer, stopping: Callable[[], bool]
) -> web.StreamResponse:
    """Send `answer` on and note in the exchange's end line how it went.

    Raises ConnectionResetError if the client is gone, Failure if nothing has been sent.
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
    try:
        error = await _stream(response, answer, exchange)
    except asyncio.CancelledError:
        if not stopping():
            raise
        error = STOPPED
    if error is not None:
        end.status = "proxy_stopped" if error is STOPPED else "failed"
        end.error = error
        await response.write(error_event(Failure(502, end.instance, error)))
        response.force_close()
    elif end.error is None:
        end.status = "ok"
    await response.write_eof()
    return response


async def _stream(
    response: web.StreamResponse, answer: Answer, exchange: Exchange
) -> str | None:
    """Pass the chunks on as fast as the client takes them; what broke, if it did.

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
            await response.write_eof(chunk)
            return None
        await response.write(chunk)
        try:
            chunk = await answer.chunk()
        except TimeoutError:
            return f"{name} went silent in the middle of its answer"
        except (aiohttp.ClientError, OSError) as error:
            return f"{name} broke off in the middle of its answer: {error}"
    return None if done else f"{name} ended its answer without [DONE]"


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
