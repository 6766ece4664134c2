# SPDX-License-Identifier: Apache-2.0
"""Requests of a replay over HTTP: their bodies, the client, checks before the first."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter_ns
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
from kvtax.load.alarm import Alarm
from kvtax.load.client import Client
from kvtax.load.plan import completion_body
from kvtax.load.sse import Usage
from kvtax.records.requests import ReplayedRequest, RequestOutcome, in_header
from msgspec.json import encode

from kvtax_fleet.replay.options import ReplayError
from kvtax_fleet.replay.sessions import STOPPED, Session, asked_output_tokens
from kvtax_fleet.trace import Request
from kvtax_fleet.trace.prompts import prompt

# Time for which this thread may hold the interpreter while the sending thread waits.
# The sending thread releases it at every system call, so that one request would wait
# several times. Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.00005
# Token ids in one call of the encoder, which nothing interrupts: some 50 us.
PIECE_TOKENS = 2048


class Bodies:
    """The bodies of a replay, made one after another."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "bodies")
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def prepare(self, requests: list[Request]) -> list[Future[bytes]]:
        """Begin to make the bodies. The thread wakes once for all of them."""
        made: list[Future[bytes]] = [Future() for _ in requests]
        self._thread.submit(self._make, requests, made)
        return made

    def _make(self, requests: list[Request], made: list[Future[bytes]]) -> None:
        for request, body in zip(requests, made, strict=True):
            try:
                body.set_result(self._body(request))
            except Exception as error:  # raised again where the body is awaited
                body.set_exception(error)

    def _body(self, request: Request) -> bytes:
        ids = _in_pieces(prompt(request, self._vocab_size))
        return completion_body(self._model, ids, asked_output_tokens(request))


def _in_pieces(tokens: np.ndarray[Any, Any]) -> msgspec.Raw:
    """Encode the JSON array of `tokens`, piece by piece."""
    pieces = range(0, len(tokens), PIECE_TOKENS)
    texts = [encode(tokens[at : at + PIECE_TOKENS].tolist())[1:-1] for at in pieces]
    return msgspec.Raw(b"[" + b",".join(texts) + b"]")


class ReplayClient(Client[RequestOutcome]):
    """A client that sends the requests of a trace to one server."""

    stopped = STOPPED

    async def send(self, record: ReplayedRequest, body: bytes) -> None:
        """Fill in the record to its end, whatever happens."""
        headers = {
            "X-Session-Id": in_header(record.session),
            "X-Request-Id": in_header(record.id),
        }
        await self.request(record, body, headers | authorization())

    def take_head(
        self, record: RequestOutcome, response: aiohttp.ClientResponse
    ) -> None:
        """Note the response's status, and the instances that a proxy reports."""
        super().take_head(record, response)
        assert isinstance(record, ReplayedRequest)
        record.instance = response.headers.get("X-Kvtax-Instance")
        record.prefill_instance = response.headers.get("X-Kvtax-Prefill")

    def take_usage(self, record: RequestOutcome, usage: Usage) -> None:
        """Note the server's token counts. Raises StreamError if they are wrong."""
        assert isinstance(record, ReplayedRequest)
        record.usage_prompt_tokens = usage.prompt_tokens
        record.usage_completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
        assert record.input_tokens is not None and record.output_tokens is not None
        usage.check(record.input_tokens, record.output_tokens)


def authorization() -> dict[str, str]:
    """Make the header for a server that wants a key, from OPENAI_API_KEY."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


TIMEOUT_S = 30.0


class Model(msgspec.Struct):
    """One entry of /v1/models; `max_model_len` is vLLM's."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


async def find_model(
    session: aiohttp.ClientSession, url: str, name: str | None
) -> Model:
    """Ask for the model called `name`, or the only one. Raises ReplayError.

    A server without /v1/models is expected to know a given name.
    """
    where = f"{url}/v1/models"
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            session.get(where, headers=authorization()) as response,
        ):
            status, body = response.status, await response.read()
    except TimeoutError:
        raise ReplayError(f"{where}: no answer within {TIMEOUT_S:g} s") from None
    except aiohttp.ClientError as error:
        raise ReplayError(f"{where}: {error}: is the server running?") from None
    if status in (404, 405, 501) and name is not None:
        return Model(name)
    if status != 200:
        raise ReplayError(f"{where}: HTTP {status}: {body[:200]!r}; or give --model")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReplayError(f"{where}: {error}") from None
    named = [model for model in models if name in (None, model.id)]
    if len(named) == 1 or (named and name is not None):
        return named[0]
    there = ", ".join(model.id for model in models) or "none"
    raise ReplayError(
        f"{where}: no model {name!r}, there is: {there}"
        if name is not None
        else f"{where}: choose one with --model, there is: {there}"
    )


def check_vocabulary(sessions: list[Session], vocab_size: int) -> None:
    """Raise ReplayError if the vocabulary is too small for distinct blocks."""
    try:
        prompt(sessions[0].turns[0], vocab_size)
    except ValueError as error:
        raise ReplayError(f"--vocab-size {vocab_size}: {error}") from None


def check_lengths(sessions: list[Session], model: Model) -> None:
    """Raise ReplayError if a request does not fit into the model's context."""
    if model.max_model_len is None:
        return
    too_long = [
        request
        for session in sessions
        for request in session.turns
        if request.input_tokens + asked_output_tokens(request) > model.max_model_len
    ]
    if not too_long:
        return
    first = too_long[0]
    raise ReplayError(
        f"{len(too_long)} requests are longer than the {model.max_model_len} tokens "
        f"that {model.id} takes, the first is {first.session}/{first.turn} with "
        f"{first.input_tokens} in the prompt and {asked_output_tokens(first)} in the "
        "answer: serve with a larger max_model_len, and with as many num_blocks as it "
        "takes, or leave these sessions out"
    )


class HttpLink:
    """kvtax_fleet.replay.play.Link over HTTP, in real time."""

    now_ns = staticmethod(perf_counter_ns)

    def __init__(self, client: ReplayClient, bodies: Bodies, alarm: Alarm) -> None:
        self.send = client.send
        self.prepare = bodies.prepare
        self.sleep_until = alarm.sleep_until
