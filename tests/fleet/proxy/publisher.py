# SPDX-License-Identifier: Apache-2.0
"""A publisher of KV events like vLLM's, and a subscriber to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from fleet.proxy.exact import BlockStored, Exact
from fleet.proxy.kv_events import Batch, Subscriber

DEADLINE_S = 10.0
BLOCK = 4


class Publisher:
    """Publishes like vLLM's ZmqEventPublisher, and can lose what it publishes."""

    def __init__(self, folder: Path, kept: int = 1000, hole: int = 0) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self._kept = kept
        self._hole = hole  # the first replay leaves out every `hole`-th batch
        self.topic: list[bytes] = [b""]  # in a replay; none to 0.25.1
        self._batches: list[tuple[int, bytes]] = []
        self._numbers = count()
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self._task = asyncio.create_task(self._replay())

    async def publish(self, *events, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode(Batch(time.time(), list(events)))
        await self.publish_raw(payload, lost=lost)

    async def publish_raw(self, payload: bytes, lost: bool = False) -> None:
        number = next(self._numbers)
        self._batches.append((number, payload))
        del self._batches[: -self._kept]
        if not lost:
            sequence = number.to_bytes(8, "big")
            await self._pub.send_multipart([b"", sequence, payload])

    async def _replay(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            for number, payload in self._batches:
                if self._hole and number % self._hole == self._hole - 1:
                    continue
                if number >= int.from_bytes(first, "big"):
                    frames = [number.to_bytes(8, "big"), payload]
                    await self._answer(client, frames)
            self._hole = 0
            end = (-1).to_bytes(8, "big", signed=True)
            await self._answer(client, [end, b""])

    async def _answer(self, client: bytes, frames: list[bytes]) -> None:
        await self._router.send_multipart([client, b"", *self.topic, *frames])

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(0)
        self._router.close(0)


def stored(number: int) -> BlockStored:
    """A prompt of one block that is like no other."""
    return BlockStored([number], None, [number] * BLOCK, BLOCK)


def cached(exact: Exact, number: int) -> bool:
    prompt = json.dumps([number] * BLOCK + [0]).encode()
    return exact.cached_tokens(prompt, "m") == [BLOCK]


@asynccontextmanager
async def subscribed(exact: Exact, endpoint: str, replay: str | None):
    """A running subscriber for instance 0, and a way to wait for what it brings."""
    subscriber = Subscriber(
        "a", endpoint, replay, partial(exact.apply, 0), partial(exact.clear, 0)
    )
    task = asyncio.create_task(subscriber.run())

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not true():
                assert not task.done(), task.exception()
                await asyncio.sleep(0.01)

    try:
        yield subscriber, until
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(scenario: Callable[..., Awaitable[None]], folder: Path, **options: int) -> None:
    async def whole() -> None:
        publisher = Publisher(folder, **options)
        try:
            await scenario(publisher, Exact(1))
        finally:
            publisher.close()

    asyncio.run(whole())
