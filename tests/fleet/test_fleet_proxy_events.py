# SPDX-License-Identifier: Apache-2.0
"""KV events over ZMQ: late subscribers, gaps, restarts, and vLLM's own publisher."""

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
import pytest
import zmq
import zmq.asyncio
from proxy_lab import Proxy, ask, post, proxy, until

from fleet.instances import Instance
from fleet.proxy.exact import AllBlocksCleared, BlockRemoved, BlockStored, Exact
from fleet.proxy.kv_events import Batch, Subscriber
from fleet.standin.process import standin

DEADLINE_S = 10.0
BLOCK = 4


class Publisher:
    """Publishes like vLLM's ZmqEventPublisher, and can lose what it publishes."""

    def __init__(self, folder: Path, kept: int = 1000, hole: int = 0) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self._kept = kept
        self._hole = hole  # a replay leaves out every so-manieth batch, once
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
                    frames = [client, b"", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            self._hole = 0
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([client, b"", end, b""])

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


def test_who_comes_late_gets_what_was_before(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        for number in range(5):
            await publisher.publish(stored(number))
        await publisher.publish(BlockRemoved([3]))
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: exact.tokens == [4 * BLOCK])
            assert [cached(exact, n) for n in range(5)] == [1, 1, 1, 0, 1]
            await publisher.publish(stored(5))
            await until(lambda: cached(exact, 5))
            assert subscriber.complete
            assert subscriber.gaps == 0

    run(scenario, tmp_path)


def test_a_gap_is_noticed_and_replayed(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: subscriber.complete)  # nothing has happened yet
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            await publisher.publish(stored(1), lost=True)
            await publisher.publish(BlockRemoved([0]), lost=True)
            await publisher.publish(stored(2))
            await until(lambda: cached(exact, 2))
            assert cached(exact, 1)
            assert not cached(exact, 0)
            assert (subscriber.gaps, subscriber.complete) == (1, True)

    run(scenario, tmp_path)


def test_a_replay_with_a_hole_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        for number in range(20):
            await publisher.publish(stored(number))
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: exact.tokens == [20 * BLOCK])
            assert subscriber.complete

    run(scenario, tmp_path, hole=7)


def test_what_can_no_longer_be_replayed_empties_the_state(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            for number in range(1, 6):
                await publisher.publish(stored(number), lost=True)
            await publisher.publish(stored(6))
            await until(lambda: cached(exact, 6))
            # Who knows what is left of number 0.
            assert [n for n in range(7) if cached(exact, n)] == [4, 5, 6]
            assert not subscriber.complete
            await publisher.publish(AllBlocksCleared())
            await until(lambda: subscriber.complete)
            assert exact.tokens == [0]

    run(scenario, tmp_path, kept=3)


def test_without_a_replay_endpoint_a_gap_empties_the_state(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        await publisher.publish(stored(0), lost=True)
        async with subscribed(exact, publisher.endpoint, None) as (subscriber, until):
            assert not subscriber.complete
            while not exact.tokens[0]:  # until the subscription is there
                await publisher.publish(stored(0))
                await asyncio.sleep(0.02)
            await publisher.publish(stored(1), lost=True)
            await publisher.publish(stored(2))
            await until(lambda: cached(exact, 2))
            assert exact.tokens == [BLOCK]
            assert not subscriber.complete

    run(scenario, tmp_path)


def test_an_instance_that_starts_anew_has_nothing_cached(tmp_path: Path) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            for number in range(3):
                await publisher.publish(stored(number))
            await until(lambda: exact.tokens == [3 * BLOCK])
            publisher.close()
            await asyncio.sleep(0.1)
            again = Publisher(tmp_path)
            try:
                await again.publish(stored(9))
                ((_, payload),) = again._batches
                # Until the subscription has come back: the new one's first message.
                while not cached(exact, 9):
                    await again._pub.send_multipart([b"", bytes(8), payload])
                    await asyncio.sleep(0.05)
                assert exact.tokens == [BLOCK]
                assert subscriber.complete
                # And one that says nothing: what was ejected is asked again.
                subscriber.resync()
                await asyncio.sleep(0.1)
                await until(lambda: exact.tokens == [BLOCK])
            finally:
                again.close()

    run(scenario, tmp_path)


def test_an_unreadable_message_costs_the_state_and_not_the_subscription(
    tmp_path: Path,
) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(0))
            await until(lambda: cached(exact, 0))
            await publisher.publish_raw(b"\xc1 not msgpack")
            await until(lambda: not subscriber.complete)
            # It stays in what can be replayed: nobody must trip over it again.
            await publisher.publish(stored(1))
            await publisher.publish(stored(2), lost=True)
            await publisher.publish(stored(3))
            await until(lambda: all(cached(exact, number) for number in (1, 2, 3)))
            await publisher.publish(AllBlocksCleared())
            await until(lambda: subscriber.complete)
        async with subscribed(exact, *ends) as (subscriber, until):
            await publisher.publish(stored(4))
            await until(lambda: cached(exact, 4))

    run(scenario, tmp_path)


@pytest.mark.slow
def test_ids_are_routed_by_the_events_and_text_says_that_it_is_not(
    tmp_path: Path,
) -> None:
    prompt = list(range(40))

    def client(on: Proxy, publish: Callable[..., None]) -> None:
        until(
            lambda: on.instances()["b"]["cache"]["exact_tokens"] == 40,
            "the events of before did not arrive",
        )
        assert post(on.url, ask(prompt), X_Request_Id="ids").status == 200
        assert post(on.url, ask("words " * 40), X_Request_Id="text").status == 200
        on.end("text")
        ids, text = on.lines("decision")
        cached = [one["cached_tokens"] for one in ids["snapshot"]["candidates"]]
        assert (ids["cache"], ids["instance"], cached) == ("exact", "b", [0, 36])
        assert (text["cache"], text["form"]) == ("mirror", "text")
        cache = on.instances()["b"]["cache"]
        assert cache["mirror_minus_exact_tokens"] == -40
        assert (cache["mean_difference_tokens"], cache["compared_prompts"]) == (36, 1)
        publish(AllBlocksCleared())
        until(
            lambda: (
                b'kvtax_proxy_cache_exact_tokens{instance="b"} 0.0'
                in on.get("/metrics").body
            ),
            "the reset did not arrive",
        )

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        publishers = [Publisher(tmp_path / name) for name in "ab"]
        chain = BlockStored(list(range(10)), None, prompt, BLOCK)
        await publishers[1].publish(chain)

        def publish(*events) -> None:
            done = publishers[1].publish(*events)
            asyncio.run_coroutine_threadsafe(done, loop).result()

        def run_client() -> None:
            with standin() as a, standin() as b:
                instances = [
                    Instance(
                        name,
                        at.url,
                        kv_events=one.endpoint,
                        kv_events_replay=one.replay_endpoint,
                    )
                    for name, at, one in zip("ab", (a, b), publishers, strict=True)
                ]
                with proxy(tmp_path, instances, "lmetric", "--cache", "exact") as on:
                    client(on, publish)

        try:
            await asyncio.to_thread(run_client)
        finally:
            for one in publishers:
                one.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_vllms_own_publisher_is_understood(tmp_path: Path) -> None:
    """More batches than a ZMQ socket queues at once, in vLLM's own types."""
    vllm = pytest.importorskip("vllm.distributed.kv_events")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = vllm.ZmqEventPublisher(0, endpoint, replay, buffer_steps=10_000)
    total = 5000

    def publish(*events) -> None:
        publisher.publish(vllm.KVEventBatch(ts=time.time(), events=list(events)))

    def block(number: int):
        return vllm.BlockStored(
            block_hashes=[b"%d" % number],
            parent_block_hash=None,
            token_ids=[number] * BLOCK,
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None],
        )

    async def scenario(exact: Exact) -> None:
        async with subscribed(exact, endpoint, replay) as (subscriber, until):
            await until(lambda: exact.tokens == [total * BLOCK])
            assert subscriber.complete
            publish(vllm.BlockRemoved(block_hashes=[b"7"], medium="GPU"))
            await until(lambda: exact.tokens == [(total - 1) * BLOCK])
            assert not cached(exact, 7)
            assert cached(exact, 8)
            publish(vllm.AllBlocksCleared())
            await until(lambda: exact.tokens == [0])

    try:
        for number in range(total):
            publish(block(number))
        while publisher._event_queue.qsize():
            time.sleep(0.01)
        asyncio.run(scenario(Exact(1)))
    finally:
        publisher.shutdown()
