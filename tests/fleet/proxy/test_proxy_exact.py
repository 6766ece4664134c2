# SPDX-License-Identifier: Apache-2.0
"""Routing by KV events: through the proxy, and from vLLM's own publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from proxy_lab import Proxy, ask, post, proxy, until
from publisher import BLOCK, Publisher, cached, subscribed

from fleet.proxy.exact import AllBlocksCleared, BlockStored, Exact
from fleet.standin.process import standin
from lab.records.instances import Instance


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
