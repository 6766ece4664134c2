# SPDX-License-Identifier: Apache-2.0
"""An instance's answer to the client, byte for byte.

The event stream is not parsed: the first chunk is the first token, and events with
tokens, errors and the end are looked for as bytes. A stream that breaks off, or ends
without what its API ends with ([DONE], for one), ends for the client with an error
event; so does one that is cancelled because the proxy stops. A client that takes
nothing for too long is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .apis import APIS
from .client import Client
from .exchange import Exchange
from .upstream import Answer, Failure

STOPPED = "the proxy was stopped"
# Of what came before a chunk: no mark in apis.py is longer.
_TAIL = 32


async def relay(
    exchange: Exchange, answer: Answer, stopping: Callable[[], bool], now_ns: int
) -> None:
    """Send `answer`, begun `now_ns`, on; note in the exchange's end line how it went.

    Raises ConnectionResetError if the client is gone, or takes nothing for too long.
    """
    end, headers, client = exchange.end, answer.headers, exchange.client
    headers["X-Kvtax-Instance"] = end.instance
    if end.prefill_instance is not None:
        headers["X-Kvtax-Prefill"] = end.prefill_instance
    end.http_status = answer.status
    end.first_byte_ns = now_ns
    exchange.flight.first_token()
    if not answer.streams:
        end.status = "ok" if answer.status < 400 else "failed"
        if end.status == "failed":
            end.error = answer.first[:300].decode(errors="replace")
        client.whole(answer.status, headers, answer.first)
        return
    await client.begin(answer.status, headers)
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
        await client.break_off(failure)
    elif end.error is None:
        end.status = "ok"
    await client.end()


async def _stream(client: Client, answer: Answer, exchange: Exchange) -> None:
    """Pass the chunks on as fast as the client takes them. Raises Failure.

    A last chunk that is known to be the last goes out in one write with the end.
    """
    api = APIS[client.path]
    tail, ending, complete = b"\n", False, False
    end = exchange.end
    name = end.instance
    chunk = answer.first
    while chunk:
        joined = tail + chunk
        events = joined.count(api.token) - tail.count(api.token)
        exchange.flight.generated(events)
        end.generated_tokens += events
        if any(map(joined.__contains__, api.errors)):
            end.status, end.error = "failed", f"{name} sent an error event"
        ending = ending or any(map(joined.__contains__, api.ends))
        tail = joined[-_TAIL:]
        complete = ending and tail.endswith(b"\n\n")
        if complete and end.error is None:
            # From here on nothing is missing: OpenAI's client hangs up after [DONE].
            end.status = "ok"
        if complete and answer.at_end:
            await client.end(chunk)
            return
        await client.write(chunk)
        chunk = await answer.chunk()
    if not complete:
        what = api.ends[0].decode().partition(": ")[2]
        raise Failure(502, name, f"{name} ended its answer without {what}")
