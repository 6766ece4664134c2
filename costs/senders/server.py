# SPDX-License-Identifier: Apache-2.0
"""The server that load generators send to: answers at once, notes each arrival.

`GET /arrivals` gives the arrival times (CLOCK_MONOTONIC ns) and forgets them. Starts
and ends like lab.load.trivial_server.
"""

from __future__ import annotations

import asyncio
from time import perf_counter_ns

import msgspec
from aiohttp import web

from fleet.standin.answers import CompletionAnswer, Counts
from fleet.standin.asks import Ask
from lab.load.trivial_server import build_app, serve, start_stream


class BenchAsk(Ask):
    prompt: msgspec.Raw = msgspec.Raw()


arrivals: list[int] = []


async def completions(request: web.Request) -> web.StreamResponse:
    """The first token in a write of its own, the rest in a second one."""
    arrivals.append(perf_counter_ns())
    ask = msgspec.json.decode(await request.read(), type=BenchAsk)
    made = ask.output_tokens
    answer = CompletionAnswer(ask, "cmpl-0", chat=False)
    response = await start_stream(request)
    await response.write(answer.tokens(1, last=False))
    # Token ids are counted by their commas; of a text nobody here asks the count.
    counts = Counts(bytes(ask.prompt).count(b",") + 1, 0, made)
    rest = answer.tokens(made - 1, last=True) + answer.end(counts, usage=True)
    await response.write(rest)
    return response


async def take_arrivals(_: web.Request) -> web.Response:
    taken = arrivals.copy()
    arrivals.clear()
    return web.json_response(taken)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "null"}]})


if __name__ == "__main__":
    app = build_app(completions)
    app.router.add_get("/arrivals", take_arrivals)
    app.router.add_get("/v1/models", models)
    asyncio.run(serve(app))
