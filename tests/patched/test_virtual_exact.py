# SPDX-License-Identifier: Apache-2.0
"""Exact cache state is what an engine will find, as late as its events are."""

from __future__ import annotations

import asyncio
import random

from virtual_lab import virtual_engine
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from fleet.virtual.client import VirtualBody
from fleet.virtual.exact import VirtualIndex
from fleet.virtual.instance import VirtualInstance
from fleet.virtual.loop import VirtualLoop
from lab.records.host_times import RequestTimes

PATCHES = ["step_timing_v1", "step_timing_v2"]

# Too few for all prompts: blocks are evicted all the time.
BLOCKS = 200
DELAY_NS = 20_000_000


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    stems = [[rng.randrange(1, 1000) for _ in range(1_500)] for _ in range(5)]
    found = []
    for _ in range(150):
        stem = rng.choice(stems)[: rng.randrange(1, 1_500)]
        tail = [rng.randrange(1, 1000) for _ in range(rng.randrange(100))]
        found.append(stem + tail)
    return found


def asked_in_turn(model, delay_ns: int) -> list[tuple[int, int, int]]:
    """Of each request what is believed cached just before `delay_ns` after the last
    one's end, what then, and what the engine finds.
    """
    engine = virtual_engine(model, BLOCKS, False, events=True)

    async def serve() -> list[tuple[int, int, int]]:
        loop = asyncio.get_running_loop()
        instance = VirtualInstance(engine, loop, RequestTimes())
        index = VirtualIndex({"i": engine}, loop, delay_ns, 16)
        found = []
        for prompt in prompts():
            body = VirtualBody(prompt, 3)
            await loop.sleep_until(loop.now_ns() + delay_ns - 1)
            (before,) = await index.cached_tokens(body)
            await asyncio.sleep(0.001)
            (then,) = await index.cached_tokens(body)
            earlier = instance.totals.cached_tokens
            answer = instance.ask(body.raw)
            await answer.begin()
            while await answer.chunk():
                pass
            found.append((before, then, instance.totals.cached_tokens - earlier))
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(serve())


def test_what_is_believed_is_what_the_engine_finds(model):
    found = asked_in_turn(model, 0)
    assert [then for _, then, _ in found] == [cached for *_, cached in found]
    assert sum(cached > 0 for *_, cached in found) > 50


def test_events_are_known_when_they_are_due_and_not_before(model):
    found = asked_in_turn(model, DELAY_NS)
    assert [then for _, then, _ in found] == [cached for *_, cached in found]
    assert any(before != then for before, then, _ in found)


class ToldEngine:
    """Tells of blocks what a test says, one message a second."""

    def tell_events(self, told) -> None:
        self.told = told

    def block_hashes(self, prompt: list[int]) -> list[int]:
        return prompt


def test_what_a_lost_message_said_is_known_with_the_next_in_its_order():
    chance, rng, engine = random.Random(3), random.Random(5), ToldEngine()
    second_ns = 10**9

    async def tell() -> int:
        loop = asyncio.get_running_loop()
        index = VirtualIndex({"i": engine}, loop, DELAY_NS, 1, 0.4, random.Random(3))
        cached, known, gaps = set(), set(), 0
        for number in range(300):
            lost, missed = chance.random() < 0.4, known != cached
            block = rng.randrange(9)
            if block in cached:
                events = [BlockRemoved(block_hashes=[block], medium="GPU")]
            else:
                events = [
                    BlockStored(
                        block_hashes=[block],
                        parent_block_hash=None,
                        token_ids=[],
                        block_size=1,
                        lora_id=None,
                        medium="GPU",
                        lora_name=None,
                    )
                ]
            cached ^= {block}
            engine.told(events, loop.now_ns())
            if not lost:
                gaps += missed
                # A gap is asked for, and answered, before it is closed.
                await asyncio.sleep((3 if missed else 1) * DELAY_NS / 1e9 - 1e-9)
                assert await seen(index) == known
                known = set(cached)
            await loop.sleep_until((number + 1) * second_ns)
            assert await seen(index) == known
        return gaps

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(tell()) > 30


async def seen(index: VirtualIndex) -> set[int]:
    found = set()
    for block in range(9):
        # The block of the last token does not count.
        (tokens,) = await index.cached_tokens(VirtualBody([block, 0], 1))
        found |= {block} if tokens else set()
    return found
