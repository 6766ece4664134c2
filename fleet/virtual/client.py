# SPDX-License-Identifier: Apache-2.0
"""The replayer's way to the proxy in virtual time, and what the proxy sees of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from multidict import CIMultiDict, MultiMapping

from fleet.proxy.body import Body
from fleet.proxy.client import COMPLETIONS, Client, error_json
from fleet.proxy.upstream import Failure
from fleet.replay.client import ReplayClient
from fleet.replay.records import asked_output_tokens
from fleet.trace import Request
from fleet.trace.prompts import prompt
from fleet.virtual.instance import Asked
from fleet.virtual.loop import VirtualLoop
from lab.load.sse import CompletionStream, StreamError
from lab.records.replay import ReplayedRequest

MODEL = "model"
Handle = Callable[[Client], Awaitable[None]]


class VirtualBody(Body):
    """A completion of token ids. What is sent on is an Asked, in place of JSON."""

    def __init__(self, ids: list[int], output_tokens: int) -> None:
        self.prompt = msgspec.json.encode(ids)
        self._fields = {"model": msgspec.Raw(b'"model"'), "prompt": self.prompt}
        self.form = "ids"
        self.prompt_tokens = len(ids)
        self.raw = Asked(ids, output_tokens)

    def with_transfer(self, params: dict[str, Any]) -> Asked:
        return msgspec.structs.replace(self.raw, kv_transfer_params=params)

    def prefill_only(self, params: dict[str, Any]) -> Asked:
        return msgspec.structs.replace(
            self.raw, output_tokens=1, stream=False, kv_transfer_params=params
        )


class VirtualClient:
    """fleet.proxy.client.Client: keeps what it is answered, and when."""

    path = COMPLETIONS

    def __init__(
        self, headers: dict[str, str], body: VirtualBody, now_ns: Callable[[], int]
    ) -> None:
        self.headers: MultiMapping[str] = CIMultiDict(headers)
        self._body = body
        self._now_ns = now_ns
        self.pieces: list[tuple[bytes, int]] = []
        self.status = 0
        self.answered: MultiMapping[str] = CIMultiDict()

    async def body(self) -> VirtualBody:
        return self._body

    def refuse(self, failure: Failure) -> None:
        self.whole(failure.status, self.answered, error_json(failure))

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        self.status, self.answered = status, headers
        self._take(body)

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self.status, self.answered = status, headers

    async def write(self, chunk: bytes) -> None:
        self._take(chunk)

    async def end(self, chunk: bytes = b"") -> None:
        self._take(chunk)

    async def break_off(self, failure: Failure) -> None:
        self._take(b"\n\ndata: " + error_json(failure) + b"\n\n")

    def _take(self, piece: bytes) -> None:
        self.pieces.append((piece, self._now_ns()))


class VirtualLink(ReplayClient):
    """fleet.replay.play.Link: sends to a proxy's `handle`, by the loop's clock."""

    def __init__(
        self, loop: VirtualLoop, handle: Handle, vocab_size: int, timeout_s: float
    ) -> None:
        self.now_ns = loop.now_ns
        self.sleep_until = loop.sleep_until
        self._handle = handle
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s

    def prepare(self, requests: list[Request]) -> list[Future[Request]]:
        """There is nothing to prepare: making a prompt takes no virtual time."""
        return [_made(request) for request in requests]

    async def _exchange(
        self, record: ReplayedRequest, request: Request, headers: dict[str, str]
    ) -> None:
        ids = prompt(request, self._vocab_size).tolist()
        body = VirtualBody(ids, asked_output_tokens(request))
        client = VirtualClient(headers, body, self.now_ns)
        record.sent_ns = self.now_ns()
        await self._handle(client)
        self.take_head(record, client)
        stream = CompletionStream()
        if client.status != 200:
            text = b"".join(piece for piece, _ in client.pieces)[:500]
            raise StreamError(f"HTTP {client.status}: {text.decode()}")
        try:
            for piece, at_ns in client.pieces:
                stream.feed(piece, at_ns)
        finally:
            record.first_token_ns = stream.first_token_ns
        self.take_end(record, stream)


def _made(request: Request) -> Future[Request]:
    made: Future[Request] = Future()
    made.set_result(request)
    return made
