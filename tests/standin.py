# SPDX-License-Identifier: Apache-2.0
"""Stand-in for vLLM with faults: a real process that tests talk to over loopback.

The model name of a request says what goes wrong with it: "null" nothing, "stall/30"
the thirtieth request stalls, "mixed" each of FAILURES in turn and then nothing. It
counts prefix-cache hits of whole prompts and, like vLLM up to 0.22.1, answers 200 to a
reset whether it happened or not. /request_ids lists each X-Request-Id so far. Started
as `python -m tests.standin`, it behaves like lab.load.trivial_server to its parent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from itertools import count

from aiohttp import web

from lab.load.trivial_server import (
    build_app,
    serve,
    start_stream,
    token_event,
    usage_event,
)

SLOW_TOKEN_S = 0.05
STALL_S = 2.0
BLOCK_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class Cache:
    """Whole prompts served so far, and the two counters vLLM shows for them."""

    def __init__(self) -> None:
        self.prompts: set[tuple[int, ...]] = set()
        self.queries = self.hits = self.in_flight = self.resets_to_ignore = 0

    def look_up(self, prompt: list[int]) -> None:
        key = tuple(prompt)
        self.queries += len(prompt)
        if key in self.prompts:
            self.hits += (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.prompts.add(key)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text="# TYPE vllm:prefix_cache_hits_total counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.queries}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}.0\n'
        )

    async def reset(self, _: web.Request) -> web.Response:
        if self.resets_to_ignore:
            self.resets_to_ignore -= 1
        elif not self.in_flight:
            self.prompts.clear()
        return web.Response()

    async def ignore_resets(self, request: web.Request) -> web.Response:
        self.resets_to_ignore = int(request.query["n"])
        return web.Response()


async def _null(request: web.Request, ask: dict) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(token_event(1) * ask["max_tokens"])
    await response.write(usage_event(len(ask["prompt"]), ask["max_tokens"]) + DONE)
    return response


async def _slow(request: web.Request, ask: dict) -> web.StreamResponse:
    response = await start_stream(request)
    for _ in range(ask["max_tokens"]):
        await response.write(token_event(1))
        await asyncio.sleep(SLOW_TOKEN_S)
    await response.write(usage_event(len(ask["prompt"]), ask["max_tokens"]) + DONE)
    return response


async def _stall(request: web.Request, ask: dict) -> web.StreamResponse:
    time.sleep(STALL_S)  # the whole server stands still
    return await _null(request, ask)


async def _hang(_: web.Request, __: dict) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _http500(_: web.Request, __: dict) -> web.StreamResponse:
    raise web.HTTPInternalServerError(text="engine is dead")


async def _inband(request: web.Request, _: dict) -> web.StreamResponse:
    response = await start_stream(request)
    error = {"error": {"message": "engine died", "type": "Internal", "code": 500}}
    await response.write(token_event(1))
    await response.write(f"data: {json.dumps(error)}\n\n".encode() + DONE)
    return response


async def _truncated(request: web.Request, _: dict) -> web.StreamResponse:
    response = await start_stream(request)
    await response.write(token_event(1))
    return response


async def _short(request: web.Request, ask: dict) -> web.StreamResponse:
    response = await start_stream(request)
    tokens = ask["max_tokens"] - 1
    await response.write(token_event(1) * tokens)
    await response.write(usage_event(len(ask["prompt"]), tokens) + DONE)
    return response


Answer = Callable[[web.Request, dict], Awaitable[web.StreamResponse]]
FAILURES: list[Answer] = [_hang, _http500, _inband, _truncated, _short]


def answer_to(model: str, number: int) -> Answer:
    """How to answer request `number` (from 1) to `model`."""
    fault, _, every = model.partition("/")
    if fault == "mixed":
        return [_null, *FAILURES][number % (1 + len(FAILURES))]
    if number % int(every or 1):
        return _null
    return {"null": _null, "slow": _slow, "stall": _stall}[fault]


def standin_app() -> web.Application:
    """All routes of the stand-in."""
    cache = Cache()
    ids = count(1)
    request_ids: list[str | None] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        request_ids.append(request.headers.get("X-Request-Id"))
        ask = await request.json()
        answer = answer_to(ask["model"], next(ids))
        cache.look_up(ask["prompt"])
        cache.in_flight += 1
        try:
            return await answer(request, ask)
        finally:
            cache.in_flight -= 1

    async def show_request_ids(_: web.Request) -> web.Response:
        return web.json_response(request_ids)

    app = build_app(completions)
    app.router.add_get("/request_ids", show_request_ids)
    app.router.add_get("/metrics", cache.metrics)
    app.router.add_post("/reset_prefix_cache", cache.reset)
    app.router.add_post("/ignore_resets", cache.ignore_resets)
    return app


if __name__ == "__main__":
    asyncio.run(serve(standin_app()))
