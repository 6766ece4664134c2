# SPDX-License-Identifier: Apache-2.0
"""The HTTP surface: the endpoints of vLLM that clients, proxies and routers use."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
from aiohttp import web

from fleet.counters import exposition
from fleet.standin.answers import Answer, CompletionAnswer, Counts, error_body
from fleet.standin.asks import Ask, BadAsk, read_ask
from fleet.standin.engine import Engine, Sequence, Shape
from fleet.standin.faults import Faults, UnknownFault
from fleet.standin.named_events import MessagesAnswer, ResponsesAnswer, anthropic_error
from fleet.standin.transfer import Transfers

MAX_BODY_BYTES = 64 * 2**20


class StandinInstance:
    """One stand-in: an engine behind vLLM's routes."""

    def __init__(self, model: str, shape: Shape, faults: Faults) -> None:
        self.model = model
        self.engine = Engine(shape)
        self.faults = faults
        self.transfers = Transfers(uuid4().hex, shape.transfer_us_per_token)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._maybe_deaf]
        )
        app.cleanup_ctx.append(self._run_engine)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
                *(web.post(path, self._completions) for path in _ANSWERS),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/faults", self._set_faults),
                web.get("/query", self._query),
                web.get("/kv/{transfer_id}", self._kv),
            ]
        )
        return app

    async def _run_engine(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.engine.run())
        task.add_done_callback(_die_with_engine)
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @web.middleware
    async def _maybe_deaf(self, request: web.Request, handler) -> web.StreamResponse:
        if self.faults.deaf and request.path != "/faults":
            await asyncio.Event().wait()
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        length = self.engine.shape.max_model_len
        model = {"id": self.model, "object": "model", "max_model_len": length}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = exposition(self.engine.totals, self.engine.gauges, self.model)
        return web.Response(text=text)

    async def _reset(self, _: web.Request) -> web.Response:
        self.engine.reset()  # 200 either way, as vLLM up to 0.22.1
        return web.Response()

    async def _query(self, _: web.Request) -> web.Response:
        """Mooncake's bootstrap server: the engine of each data-parallel rank."""
        entry = {"engine_id": self.transfers.engine_id, "worker_addr": {}}
        return web.json_response({"0": entry})

    async def _kv(self, request: web.Request) -> web.Response:
        tokens = await self.transfers.collect(request.match_info["transfer_id"])
        return web.Response(text=str(tokens))

    async def _set_faults(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            self.faults.set_cycle([n for n in query.get("cycle", "").split(",") if n])
        except UnknownFault as error:
            return web.json_response(error_body(str(error), 400), status=400)
        self.faults.after_tokens = int(query.get("after", self.faults.after_tokens))
        self.faults.deaf = query.get("deaf", "0") == "1"
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            fault = self.faults.next(request.headers)
            ask, tokens = await self._read(request, request.path)
        except (BadAsk, UnknownFault) as error:
            return _refused(request, str(error), getattr(error, "status", 400))
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "http500":
            return _refused(request, "engine is dead", 500)
        id_ = f"cmpl-{request.headers.get('X-Request-Id') or uuid4().hex}"
        answer = _ANSWERS[request.path](ask, id_)
        if ask.stream:
            return await self._stream(request, ask, tokens, answer, fault)
        return await self._whole(ask, tokens, answer, fault)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        try:
            _, tokens = await self._read(request, "/v1/messages")
        except BadAsk as error:
            return _refused(request, str(error), error.status)
        return web.json_response({"input_tokens": len(tokens)})

    async def _read(self, request: web.Request, path: str) -> tuple[Ask, np.ndarray]:
        body, limit = await request.read(), self.engine.shape.max_model_len
        return read_ask(body, path=path, model=self.model, max_model_len=limit)

    async def _sequence(self, ask: Ask, tokens: np.ndarray, fault: str) -> Sequence:
        params = ask.kv_transfer_params or {}
        received = 0
        if params.get("do_remote_prefill"):
            # All but the last token, which is computed here for its logits.
            received = min(await self.transfers.pull(params), len(tokens) - 1)
        made = max(1, ask.output_tokens - (fault == "short"))
        return Sequence(tokens, made, received)

    async def _stream(
        self,
        request: web.Request,
        ask: Ask,
        tokens: np.ndarray,
        answer: Answer,
        fault: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        if fault == "hang_first":
            await asyncio.Event().wait()
        sequence = await self._sequence(ask, tokens, fault)
        if fault == "no_token":
            if opening := answer.opening():
                await response.write(opening)
            counts = Counts(sequence.prompt_tokens, 0, 0)
            await response.write(answer.end(counts, usage=True))
            return response
        told = 0
        generating = self.engine.generate(sequence)
        async with contextlib.aclosing(generating):
            async for count in generating:
                told += count
                over = told - self.faults.after_tokens
                if fault in _MID_STREAM and over >= 0:
                    await response.write(answer.tokens(count - over, last=False))
                    return await _MID_STREAM[fault](request, response, answer)
                last = told == sequence.max_tokens
                piece = answer.tokens(count, last=last)
                if last:
                    counts = Counts(sequence.prompt_tokens, sequence.cached, told)
                    wanted = ask.wants_usage and fault != "no_usage"
                    piece += answer.end(counts, usage=wanted)
                await response.write(piece)
        return response

    async def _whole(
        self, ask: Ask, tokens: np.ndarray, answer: Answer, fault: str
    ) -> web.StreamResponse:
        sequence = await self._sequence(ask, tokens, fault)
        generating = self.engine.generate(sequence)
        async with contextlib.aclosing(generating):
            async for _ in generating:
                if fault == "exit":
                    os._exit(1)
                if fault in _MID_STREAM:
                    await asyncio.Event().wait()
        counts = Counts(sequence.prompt_tokens, sequence.cached, sequence.made)
        transfer = self._hand_over(ask, sequence, fault)
        return web.Response(
            body=answer.body(counts, transfer), content_type="application/json"
        )

    def _hand_over(
        self, ask: Ask, sequence: Sequence, fault: str
    ) -> dict[str, Any] | None:
        params = ask.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return None
        transfer_id = params.get("transfer_id") or uuid4().hex
        if fault == "withhold_kv":
            return self.transfers.address(transfer_id) | {"do_remote_prefill": True}
        return self.transfers.offer(transfer_id, sequence.prompt_tokens)


def _refused(request: web.Request, message: str, status: int) -> web.Response:
    said = error_body(message, status)
    if request.path.startswith("/v1/messages"):
        said = anthropic_error(message, said["error"]["type"])
    return web.json_response(said, status=status)


async def _stall(
    _: web.Request, response: web.StreamResponse, __: Answer
) -> web.StreamResponse:
    await asyncio.Event().wait()
    return response


async def _inband(
    _: web.Request, response: web.StreamResponse, answer: Answer
) -> web.StreamResponse:
    await response.write(answer.error("engine died"))
    return response


async def _end(
    _: web.Request, response: web.StreamResponse, __: Answer
) -> web.StreamResponse:
    return response


async def _cut(
    request: web.Request, response: web.StreamResponse, _: Answer
) -> web.StreamResponse:
    request.transport.abort()
    return response


async def _exit(_: web.Request, __: web.StreamResponse, ___: Answer) -> NoReturn:
    os._exit(1)


_MID_STREAM = {
    "stall": _stall,
    "inband": _inband,
    "truncated": _end,
    "cut": _cut,
    "exit": _exit,
}
_ANSWERS: dict[str, Callable[[Ask, str], Answer]] = {
    "/v1/completions": partial(CompletionAnswer, chat=False),
    "/v1/chat/completions": partial(CompletionAnswer, chat=True),
    "/v1/messages": MessagesAnswer,
    "/v1/responses": ResponsesAnswer,
}


def _die_with_engine(task: asyncio.Task[None]) -> None:
    """An engine that fails must not leave a server that only hangs."""
    if not task.cancelled() and task.exception() is not None:
        raise SystemExit(f"engine: {task.exception()!r}")
