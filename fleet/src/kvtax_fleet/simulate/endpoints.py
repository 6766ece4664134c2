# SPDX-License-Identifier: Apache-2.0
"""The proxy's surroundings in virtual time: clients, upstream, exact cache state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
from kvtax.load.sse import CompletionStream, StreamError
from kvtax.records.requests import ReplayedRequest, RequestOutcome
from multidict import CIMultiDict, MultiMapping
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from kvtax_fleet.proxy.apis import COMPLETIONS
from kvtax_fleet.proxy.body import RequestBody
from kvtax_fleet.proxy.exchange import Client, Failure, error_json
from kvtax_fleet.records.exposition import Gauges
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.replay.http_link import ReplayClient
from kvtax_fleet.replay.sessions import asked_output_tokens
from kvtax_fleet.simulate.virtual_engine import Hash, VirtualEngine
from kvtax_fleet.simulate.virtual_instance import (
    VirtualAnswer,
    VirtualInstance,
    VirtualRequest,
)
from kvtax_fleet.simulate.virtual_loop import VirtualLoop
from kvtax_fleet.trace import Request
from kvtax_fleet.trace.prompts import prompt

MODEL = "model"
Handle = Callable[[Client[VirtualRequest]], Awaitable[None]]


class VirtualBody(RequestBody[VirtualRequest]):
    """A completion of token ids."""

    def __init__(self, ids: list[int], output_tokens: int) -> None:
        self.prompt = msgspec.json.encode(ids)
        self.fields = {
            "model": msgspec.Raw(b'"model"'),
            "prompt": msgspec.Raw(self.prompt),
            "stream": msgspec.Raw(b"true"),
        }
        self.form = "ids"
        self.prompt_tokens = len(ids)
        self.raw = VirtualRequest(ids, output_tokens)

    def with_transfer(self, params: dict[str, Any]) -> VirtualRequest:
        return msgspec.structs.replace(self.raw, kv_transfer_params=params)

    def prefill_only(self, params: dict[str, Any]) -> VirtualRequest:
        return msgspec.structs.replace(
            self.raw, output_tokens=1, stream=False, kv_transfer_params=params
        )


class VirtualClient:
    """A Client of the proxy that stores the pieces of its answer, with their times."""

    def __init__(
        self, headers: dict[str, str], body: VirtualBody, now_ns: Callable[[], int]
    ) -> None:
        self.path = COMPLETIONS
        self.headers: MultiMapping[str] = CIMultiDict(headers)
        self._body = body
        self._now_ns = now_ns
        self.pieces: list[tuple[bytes, int]] = []
        self.status = 0

    async def body(self) -> VirtualBody:
        return self._body

    def refuse(self, failure: Failure) -> None:
        self.status = failure.status
        self._take(error_json(failure))

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self.status = status

    async def write(self, chunk: bytes) -> None:
        self._take(chunk)

    async def end(self, chunk: bytes = b"") -> None:
        self._take(chunk)

    async def break_off(self, failure: Failure) -> None:
        self._take(b"\n\ndata: " + error_json(failure) + b"\n\n")

    def _take(self, piece: bytes) -> None:
        self.pieces.append((piece, self._now_ns()))


class VirtualLink(ReplayClient):
    """A Link of the replayer: sends to a proxy's `handle`, by the loop's clock."""

    def __init__(
        self, loop: VirtualLoop, handle: Handle, vocab_size: int, timeout_s: float
    ) -> None:
        self.now_ns = loop.now_ns
        self.sleep_until = loop.sleep_until
        self._handle = handle
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s

    def prepare(self, requests: list[Request]) -> list[Future[Request]]:
        """Return the requests: making a prompt takes no virtual time."""
        return [_completed(request) for request in requests]

    async def _exchange(
        self, record: RequestOutcome, request: Any, headers: dict[str, str] | None
    ) -> None:
        assert isinstance(record, ReplayedRequest)
        assert isinstance(request, Request)
        ids = prompt(request, self._vocab_size).tolist()
        body = VirtualBody(ids, asked_output_tokens(request))
        client = VirtualClient(headers or {}, body, self.now_ns)
        record.sent_ns = self.now_ns()
        await self._handle(client)
        record.http_status = client.status
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


def _completed(request: Request) -> Future[Request]:
    future: Future[Request] = Future()
    future.set_result(request)
    return future


class VirtualUpstream:
    """An Upstream of the proxy: instances are reachable, and no answer breaks off."""

    def __init__(self, instances: Mapping[str, VirtualInstance]) -> None:
        self._instances = instances

    async def request(
        self,
        instance: Instance,
        path: str,
        headers: MultiMapping[str],
        payload: VirtualRequest,
        streams: bool,
    ) -> VirtualAnswer:
        """Return the answer, once its first chunk is here."""
        answer = self._instances[instance.name].request(payload)
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer

    async def engine_id(self, instance: Instance) -> str:
        return instance.name

    async def gauges(self, instance: Instance) -> Gauges:
        return self._instances[instance.name].engine.gauges


class VirtualIndex:
    """Exact cache state, from the engines' own KV events, each known as its step ends.

    Equal blocks may be cached more than once: each is stored, and each removed.
    """

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        loop: VirtualLoop,
        block_tokens: int,
    ) -> None:
        self._loop = loop
        self._block_tokens = block_tokens
        self._blocks: dict[str, Counter[Hash]] = {name: Counter() for name in engines}
        self._any_engine = next(iter(engines.values()))
        for name, engine in engines.items():
            engine.on_events(partial(self._receive, self._blocks[name]))

    async def cached_tokens(self, body: RequestBody[VirtualRequest]) -> dict[str, int]:
        """Look a prompt up, without its last token's block, which vLLM computes."""
        whole = (len(body.raw.prompt) - 1) // self._block_tokens
        hashes = self._any_engine.block_hashes(body.raw.prompt)[:whole]
        return {
            name: self._block_tokens
            * sum(1 for _ in takewhile(blocks.__contains__, hashes))
            for name, blocks in self._blocks.items()
        }

    def tokens(self) -> dict[str, int]:
        """Return the tokens that each instance has cached."""
        return {
            name: self._block_tokens * blocks.total()
            for name, blocks in self._blocks.items()
        }

    def _receive(
        self, blocks: Counter[Hash], events: list[KVCacheEvent], at_ns: int
    ) -> None:
        self._loop.call_at_ns(at_ns, _apply, blocks, events)


def _apply(blocks: Counter[Hash], events: list[KVCacheEvent]) -> None:
    for event in events:
        if isinstance(event, BlockStored):
            blocks.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                blocks[block] -= 1
                if not blocks[block]:
                    del blocks[block]
        else:
            blocks.clear()
