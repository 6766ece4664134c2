# SPDX-License-Identifier: Apache-2.0
"""An instance's answer on its way to the client.

A stream is passed on byte for byte, without parsing events: the first chunk is the
first token, and tokens, errors and the end are seen as bytes. A stream that breaks
off, or ends without [DONE], ends for the client with an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from multidict import CIMultiDict

from kvtax_fleet.proxy.apis import ENDS, ERROR, EVENT_ENDS, TOKEN, with_lf
from kvtax_fleet.proxy.exchange import Answer, Exchange, Failure

STOPPED = "the proxy was stopped"
# Bytes before a chunk that are searched with it: no mark in apis.py is longer.
_TAIL = 32


async def relay(
    exchange: Exchange[Any],
    answer: Answer,
    stopping: Callable[[], bool],
    now_ns: int,
) -> Failure | None:
    """Send an answer, begun `now_ns`, to the client; fill in the exchange's end line.

    Returns the failure that ended a stream. Raises ConnectionResetError if the client
    is gone.
    """
    end, client = exchange.end, exchange.client
    headers: CIMultiDict[str] = answer.headers
    headers["X-Kvtax-Instance"] = str(end.instance)
    if end.prefill_instance is not None:
        headers["X-Kvtax-Prefill"] = end.prefill_instance
    end.http_status = answer.status
    end.first_byte_ns = now_ns
    exchange.flight.first_token()
    await client.begin(answer.status, headers)
    if not answer.streams:
        await _send_whole(exchange, answer)
        return None
    failure = None
    try:
        await _stream(exchange, answer)
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
    return failure


async def _send_whole(exchange: Exchange[Any], answer: Answer) -> None:
    """Send an answer that is no stream, all of which is its `first`."""
    end = exchange.end
    end.status = "ok" if answer.good else "failed"
    if not answer.good:
        # Its text may quote the prompt, as vLLM's does.
        kind = " and no result" if answer.status < 300 else ""
        end.error = f"{end.instance} answered HTTP {answer.status}{kind}"
    await exchange.client.end(answer.first)


async def _stream(exchange: Exchange[Any], answer: Answer) -> None:
    """Pass the chunks on as fast as the client takes them. Raises Failure.

    A last chunk that is known to be the last goes out in one write with the end.
    """
    client, end = exchange.client, exchange.end
    tail, ending, complete = b"\n", False, False
    chunk = answer.first
    while chunk:
        whole = tail + chunk
        joined = with_lf(whole)
        events = joined.count(TOKEN) - with_lf(tail).count(TOKEN)
        exchange.flight.generated(events)
        end.generated_tokens += events
        if ERROR.search(joined):
            end.status, end.error = "failed", f"{end.instance} sent an error event"
        ending = ending or any(map(joined.__contains__, ENDS))
        tail = whole[-_TAIL:]
        complete = ending and tail.endswith(EVENT_ENDS)
        if complete and end.error is None:
            # Nothing is missing from here on: OpenAI's client hangs up after [DONE].
            end.status = "ok"
        if complete and answer.at_end:
            await client.end(chunk)
            return
        await client.write(chunk)
        chunk = await answer.chunk()
    if not complete:
        why = f"{end.instance} ended its answer without [DONE]"
        raise Failure(502, end.instance, why)
