# SPDX-License-Identifier: Apache-2.0
"""Exact cache state is what an engine will find, as late as its events are."""

from __future__ import annotations

import asyncio
import random

from virtual_lab import virtual_engine

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
