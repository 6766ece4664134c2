# SPDX-License-Identifier: Apache-2.0
"""The stand-in's server: the endpoints of vLLM that clients, proxies and routers use.

    python -m tests.harness.standin.server [OPTIONS]

Prints its URL as the first line of its output once it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from time import perf_counter_ns
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web
from kvtax_fleet.records.exposition import exposition

from tests.harness.standin.messages import (
    Answer,
    BadRequest,
    Counts,
    GenerateRequest,
    error_body,
    read_request,
)
from tests.harness.standin.standin_engine import Engine, Ids, Sequence, Shape
from tests.harness.standin.transfer import Transfers

FAULTS = {
    "none": "answers correctly",
    "hang": "never begins to answer",
    "hang_first": "sends the response's head, then nothing",
    "stall": "stops after some tokens, the connection stays open",
    "http500": "answers 500 at once",
    "inband": "sends an error event after some tokens, under status 200",
    "truncated": "ends the body properly after some tokens, without [DONE]",
    "cut": "drops the connection after some tokens",
    "short": "produces and reports one token less than requested",
    "no_token": "ends the stream with the usage, without a token, under status 200",
    "no_usage": "leaves out the usage",
    "exit": "the process exits after some tokens",
    "withhold_kv": "answers as a P instance does, but never hands over the KV",
    "freeze": "the whole server stands still for 2 s, then answers correctly",
}
MID_STREAM = ("stall", "inband", "truncated", "cut", "exit")
FREEZE_S = 2.0
FAULT_HEADER = "X-Standin-Fault"
MAX_BODY_BYTES = 64 * 2**20


class Faults:
    """The faults of the next requests.

    A request's fault is its `X-Standin-Fault` header, else the next of the cycle given
    with `--faults` or `POST /faults?cycle=none,http500`; those of MID_STREAM come after
    `after_tokens`. `deaf`: the server answers nothing, not even /health.
    `ignored_resets`: so many resets of the prefix cache are answered, and not done.
    """

    def __init__(self, names: str) -> None:
        self.after_tokens = 1
        self.deaf = False
        self.ignored_resets = 0
        self._cycle: Iterator[str]
        self.set_cycle(names)

    def set_cycle(self, names: str) -> None:
        """Start a new cycle, by comma, with the next request."""
        faults = [name for name in names.split(",") if name]
        assert FAULTS.keys() >= set(faults), f"no such fault in {names}"
        self._cycle = cycle(faults or ["none"])

    def next(self, headers: Mapping[str, str]) -> str:
        """Return the fault of a request with these headers."""
        named = headers.get(FAULT_HEADER)
        return next(self._cycle) if named is None else named


class StandinInstance:
    """A stand-in: an engine behind vLLM's routes.

    `plain`: as a server that has neither /v1/models nor cached tokens in its usage.
    """

    def __init__(self, model: str, shape: Shape, faults: Faults, plain: bool) -> None:
        self.model = model
        self.engine = Engine(shape)
        self.faults = faults
        self.plain = plain
        self.arrivals: list[tuple[int, str | None]] = []
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
                web.post("/faults", self._set_faults),
                web.get("/query", self._query),
                web.get("/kv/{transfer_id}", self._kv),
                web.get("/arrivals", self._take_arrivals),
            ]
        )
        return app

    async def _run_engine(self, _: web.Application) -> AsyncIterator[None]:
        self._start_engine()
        yield
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    def _start_engine(self) -> None:
        self._running = asyncio.create_task(self.engine.run())
        self._running.add_done_callback(_die_with_engine)

    @web.middleware
    async def _maybe_deaf(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        if self.faults.deaf and request.path != "/faults":
            await asyncio.Event().wait()
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        if self.plain:
            raise web.HTTPNotFound
        length = self.engine.shape.max_model_len
        model = {"id": self.model, "object": "model", "max_model_len": length}
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = exposition(self.engine.totals, self.engine.gauges, self.model)
        return web.Response(text=text)

    async def _reset(self, _: web.Request) -> web.Response:
        # 200 either way, as vLLM up to 0.22.1.
        if self.faults.ignored_resets:
            self.faults.ignored_resets -= 1
        else:
            self.engine.reset()
        return web.Response()

    async def _take_arrivals(self, _: web.Request) -> web.Response:
        """Answer with [perf_counter_ns, X-Request-Id] of each request since last."""
        arrivals, self.arrivals = self.arrivals, []
        return web.json_response(arrivals)

    async def _query(self, _: web.Request) -> web.Response:
        """Answer as Mooncake's bootstrap server: the engine of each rank."""
        entry = {"engine_id": self.transfers.engine_id, "worker_addr": {}}
        return web.json_response({"0": entry})

    async def _kv(self, request: web.Request) -> web.Response:
        tokens = await self.transfers.collect(request.match_info["transfer_id"])
        return web.Response(text=str(tokens))

    async def _set_faults(self, request: web.Request) -> web.Response:
        query = request.query
        self.faults.set_cycle(query.get("cycle", ""))
        self.faults.after_tokens = int(query.get("after", self.faults.after_tokens))
        self.faults.deaf = query.get("deaf", "0") == "1"
        self.faults.ignored_resets = int(query.get("ignored_resets", 0))
        return web.Response()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append((perf_counter_ns(), request.headers.get("X-Request-Id")))
        try:
            fault = self.faults.next(request.headers)
            generation, tokens = await self._read(request, request.path)
        except BadRequest as error:
            return _refused(str(error), error.status)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "http500":
            return _refused("engine is dead", 500)
        if fault == "freeze":
            time.sleep(FREEZE_S)
        id_ = f"cmpl-{request.headers.get('X-Request-Id') or uuid4().hex}"
        answer = _ANSWERS[request.path](generation, id_)
        if generation.stream:
            return await self._stream(request, generation, tokens, answer, fault)
        return await self._whole(generation, tokens, answer, fault)

    async def _read(
        self, request: web.Request, path: str
    ) -> tuple[GenerateRequest, Ids]:
        body, limit = await request.read(), self.engine.shape.max_model_len
        return read_request(body, path=path, model=self.model, max_model_len=limit)

    async def _sequence(
        self, generation: GenerateRequest, tokens: Ids, fault: str
    ) -> Sequence:
        params = generation.kv_transfer_params or {}
        received = 0
        if params.get("do_remote_prefill"):
            # All but the last token, which is computed here for its logits.
            received = min(await self.transfers.pull(params), len(tokens) - 1)
        made = max(1, generation.output_tokens - (fault == "short"))
        return Sequence(tokens, made, received)

    async def _stream(
        self,
        request: web.Request,
        generation: GenerateRequest,
        tokens: Ids,
        answer: Answer,
        fault: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8"}
        )
        await response.prepare(request)
        if fault == "hang_first":
            await asyncio.Event().wait()
        sequence = await self._sequence(generation, tokens, fault)
        if fault == "no_token":
            if opening := answer.opening():
                await response.write(opening)
            counts = Counts(sequence.prompt_tokens, 0, 0)
            await response.write(answer.end(counts, usage=True))
            return response
        sent = 0
        generating = self.engine.generate(sequence)
        async with contextlib.aclosing(generating):
            async for count in generating:
                sent += count
                over = sent - self.faults.after_tokens
                if fault in MID_STREAM and over >= 0:
                    await response.write(answer.tokens(count - over, last=False))
                    await _break_off(fault, request, response, answer)
                    return response
                last = sent == sequence.max_tokens
                piece = answer.tokens(count, last=last)
                if last:
                    counts = self._counts(sequence, sent)
                    wanted = generation.wants_usage and fault != "no_usage"
                    piece += answer.end(counts, usage=wanted)
                await response.write(piece)
        return response

    async def _whole(
        self, generation: GenerateRequest, tokens: Ids, answer: Answer, fault: str
    ) -> web.StreamResponse:
        sequence = await self._sequence(generation, tokens, fault)
        generating = self.engine.generate(sequence)
        async with contextlib.aclosing(generating):
            async for _ in generating:
                if fault == "exit":
                    os._exit(1)
                if fault in MID_STREAM:
                    await asyncio.Event().wait()
        counts = self._counts(sequence, sequence.max_tokens)
        transfer = self._hand_over(generation, sequence, fault)
        return web.Response(
            body=answer.body(counts, transfer), content_type="application/json"
        )

    def _counts(self, sequence: Sequence, made: int) -> Counts:
        cached = None if self.plain else sequence.cached
        return Counts(sequence.prompt_tokens, cached, made)

    def _hand_over(
        self, generation: GenerateRequest, sequence: Sequence, fault: str
    ) -> dict[str, Any] | None:
        params = generation.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return None
        transfer_id = params.get("transfer_id") or uuid4().hex
        if fault == "withhold_kv":
            return self.transfers.address(transfer_id) | {"do_remote_prefill": True}
        return self.transfers.offer(transfer_id, sequence.prompt_tokens)


def _refused(message: str, status: int) -> web.Response:
    return web.json_response(error_body(message, status), status=status)


async def _break_off(
    fault: str, request: web.Request, response: web.StreamResponse, answer: Answer
) -> None:
    """Do as the fault says in the middle of a stream, which then ends."""
    match fault:
        case "stall":
            await asyncio.Event().wait()
        case "inband":
            await response.write(answer.error("engine died"))
        case "cut" if request.transport is not None:
            request.transport.abort()
        case "exit":
            os._exit(1)


_ANSWERS: dict[str, Callable[[GenerateRequest, str], Answer]] = {
    "/v1/completions": partial(Answer, chat=False),
    "/v1/chat/completions": partial(Answer, chat=True),
}


def _die_with_engine(task: asyncio.Task[None]) -> None:
    """End the process with its engine, lest it only hang."""
    if not task.cancelled() and task.exception() is not None:
        raise SystemExit(f"engine: {task.exception()!r}")


def main() -> None:
    """Serve until the process that started it closes its standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="null")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", default="", help="cycle of faults, by comma")
    parser.add_argument(
        "--plain", action="store_true", help="have no /v1/models and no cached tokens"
    )
    for field in msgspec.structs.fields(Shape):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    names = ("model", "faults", "plain", "port")
    model, faults, plain, port = (arguments.pop(name) for name in names)
    instance = StandinInstance(model, Shape(**arguments), Faults(faults), plain)
    asyncio.run(_serve(instance, port))


async def _serve(instance: StandinInstance, port: int) -> None:
    runner = web.AppRunner(
        instance.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        host, port = runner.addresses[0][:2]
        instance.transfers.host, instance.transfers.port = host, port
        print(f"http://{host}:{port}", flush=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, stopped.set)
        await stopped.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
