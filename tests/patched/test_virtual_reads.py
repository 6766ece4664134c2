# SPDX-License-Identifier: Apache-2.0
"""Virtual engines read each other's prefixes by the real connector's scheduler side."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest
from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.records.host_times import RequestTimes
from kvtax_fleet.records.instances import Address, Instance
from kvtax_fleet.simulate.transfers import DirectReads, Links
from kvtax_fleet.simulate.virtual_instance import VirtualInstance, VirtualRequest
from virtual_lab import (
    BLOCK_NS,
    FORWARD_NS,
    LATENCY_NS,
    LINK,
    LOOK_NS,
    run_virtually,
    virtual_engine,
)

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"

CONNECTOR = {
    "kv_connector": "DirectReadConnector",
    "kv_connector_module_path": "connectors.direct_read.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SECRET = secrets.token_hex()
PROMPT = list(range(1, 1_601))
OTHER = PROMPT[::-1]
NEXT = [*PROMPT[1:], 1]
# One token has to be computed, and with it its block.
READABLE_BLOCKS = 99


class Pair:
    """The instances `a` and `b`; each can read from the other."""

    def __init__(self, model, overlapping: bool, link: Transfer, blocks: int) -> None:
        loop = asyncio.get_running_loop()
        reads = DirectReads(Links(link, 16), loop)
        self._served = {}
        for port, name in enumerate("ab", start=1):
            moves = partial(reads.step, name)
            engine = virtual_engine(
                model, blocks, overlapping, moves, connector=CONNECTOR
            )
            address = Address("127.0.0.1", port)
            instance = Instance(name, f"http://{name}", direct_read=address)
            reads.join(instance, engine)
            self._served[name] = VirtualInstance(engine, loop, RequestTimes())
        self._loop = loop

    async def ask(self, name: str, prompt: list[int], peer: int | None = None) -> int:
        """Ask an instance for a token; how long it took, in ns."""
        params = peer and {"direct_read": {"host": "127.0.0.1", "port": peer}}
        begun_ns = self._loop.now_ns()
        answer = self._served[name].request(
            VirtualRequest(prompt, 1, kv_transfer_params=params)
        )
        await answer.begin()
        while await answer.chunk():
            pass
        return self._loop.now_ns() - begun_ns

    def reset(self, name: str) -> None:
        assert self._served[name].engine.scheduler.reset_prefix_cache()

    def call_workers(self, name: str, method: str) -> None:
        """Call the workers as vLLM's update_weights does; there are none here."""
        with suppress(NotImplementedError):
            self._served[name].engine.core.collective_rpc(method)

    def read_tokens(self, name: str) -> int:
        return self._served[name].totals.external_tokens

    def used(self, name: str) -> float:
        return self._served[name].engine.gauges.usage


def run(
    what: Callable[[Pair], Awaitable[None]],
    model,
    overlapping: bool = False,
    link: Transfer = LINK,
    blocks: int = 700,
) -> None:
    os.environ["DIRECT_READ_SECRET"] = SECRET
    os.environ.setdefault("PYTHONHASHSEED", "0")

    async def whole() -> None:
        await what(Pair(model, overlapping, link, blocks))

    run_virtually(whole())


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_prefix_comes_from_the_peer_in_the_time_of_the_link(model, overlapping):
    async def read(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        took_ns = await pair.ask("b", PROMPT, peer=1)
        assert pair.read_tokens("b") == READABLE_BLOCKS * 16
        # The peer is asked, the blocks come, and the last one is computed.
        least_ns = READABLE_BLOCKS * BLOCK_NS + 3 * LATENCY_NS + FORWARD_NS
        assert least_ns <= took_ns <= least_ns + 3 * LOOK_NS

    run(read, model, overlapping)


def test_who_asks_no_peer_computes(model):
    async def computed(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        assert await pair.ask("b", PROMPT) == FORWARD_NS
        assert pair.read_tokens("b") == 0

    run(computed, model)


def test_only_caches_that_were_reset_as_often_are_read(model):
    """A reset is the sign that an instance's weights have changed."""

    async def updated(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        pair.reset("b")
        assert await pair.ask("b", PROMPT, peer=1) >= FORWARD_NS
        assert pair.read_tokens("b") == 0
        pair.reset("a")
        await pair.ask("a", OTHER)
        await pair.ask("b", OTHER, peer=1)
        assert pair.read_tokens("b") == READABLE_BLOCKS * 16
        assert pair.used("a") == pair.used("b") == 0

    run(updated, model)


def test_only_instances_whose_weights_were_updated_as_often_are_read(model):
    """vLLM resets no cache when the weights change."""

    async def updated(pair: Pair) -> None:
        for prompt in (PROMPT, OTHER):
            await pair.ask("a", prompt)
        pair.call_workers("b", "update_weights")
        await pair.ask("b", PROMPT, peer=1)
        assert pair.read_tokens("b") == 0
        pair.call_workers("a", "update_weights")
        # What "a" has is of the weights before.
        await pair.ask("b", OTHER, peer=1)
        assert pair.read_tokens("b") == 0
        await pair.ask("a", NEXT)
        await pair.ask("b", NEXT, peer=1)
        assert pair.read_tokens("b") == READABLE_BLOCKS * 16

    run(updated, model)


def test_a_call_of_the_workers_that_only_looks_is_no_update(model):
    async def looked(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        pair.call_workers("b", "get_model_inspection")
        await pair.ask("b", PROMPT, peer=1)
        assert pair.read_tokens("b") == READABLE_BLOCKS * 16

    run(looked, model)


def test_an_offer_from_before_our_own_reset_is_not_used(model):
    async def overtaken(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        reading = asyncio.create_task(pair.ask("b", PROMPT, peer=1))
        # The question is on its way.
        await asyncio.sleep(LATENCY_NS / 2e9)
        pair.reset("b")
        await reading
        assert pair.read_tokens("b") == 0

    run(overtaken, model)


def test_nothing_is_read_before_it_is_written(model):
    async def at_once(pair: Pair) -> None:
        await asyncio.gather(pair.ask("a", PROMPT), pair.ask("b", PROMPT, peer=1))
        assert pair.read_tokens("b") == 0

    run(at_once, model)


def test_what_the_peer_evicts_during_a_read_is_computed(model):
    """The link takes a second, in which the peer needs all of its blocks."""
    slow = Transfer(kv_bytes_per_token=1, gbit_s=16 * 8 / 1e7)

    async def evicted(pair: Pair) -> None:
        await pair.ask("a", PROMPT)
        reading = asyncio.create_task(pair.ask("b", PROMPT, peer=1))
        await asyncio.sleep(0.1)
        await pair.ask("a", [7] * 1_750)
        assert await reading >= READABLE_BLOCKS * 10_000_000
        assert await pair.ask("b", PROMPT) == FORWARD_NS
        assert pair.used("a") == pair.used("b") == 0

    run(evicted, model, link=slow, blocks=112)
