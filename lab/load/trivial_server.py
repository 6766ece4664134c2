# SPDX-License-Identifier: Apache-2.0
"""The least OpenAI-compatible server: streams as many tokens as asked, at once.

It stands where vLLM would when the driver itself is measured. It listens on 127.0.0.1,
prints its port as its only line of output, and ends when its stdin is closed, so that
it never outlives whoever started it.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from aiohttp import web

MAX_BODY_BYTES = 64 * 2**20


class Ask(msgspec.Struct):
    """The part of a /v1/completions body that decides the answer."""

    prompt: list[int]
    max_tokens: int


def token_event(token_id: int) -> bytes:
    """A chunk as vLLM writes it without a tokenizer: empty text, one token id."""
    return (
        b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"null",'
        b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,'
        b'"stop_reason":null,"prompt_token_ids":null,"token_ids":[%d]}],'
        b'"usage":null}\n\n' % token_id
    )


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The last chunk: no choices, the token counts."""
    return (
        b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"null",'
        b'"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,'
        b'"completion_tokens":%d}}\n\n'
        % (prompt_tokens, prompt_tokens + completion_tokens, completion_tokens)
    )


async def start_stream(request: web.Request) -> web.StreamResponse:
    """Answer 200 with an event stream that the caller writes."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def completions(request: web.Request) -> web.StreamResponse:
    """The first token in a write of its own, the rest in a second one."""
    ask = msgspec.json.decode(await request.read(), type=Ask)
    response = await start_stream(request)
    await response.write(token_event(1))
    rest = token_event(1) * (ask.max_tokens - 1)
    usage = usage_event(len(ask.prompt), ask.max_tokens)
    await response.write(rest + usage + b"data: [DONE]\n\n")
    return response


def build_app(completions=completions) -> web.Application:
    """The routes, with another way to complete if one is given."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/completions", completions)
    return app


async def serve(app: web.Application) -> None:
    """Serve on a free port of 127.0.0.1 until stdin is closed."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096, shutdown_timeout=0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, closed.set)
        await closed.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(build_app()))
