# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: hits as a prefix cache has them, steps that cost what they
should, prefills that slow down the decodes beside them."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.standin.standin_engine import BlockCache, Engine, Sequence, Shape

PROMPTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12
)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@given(PROMPTS)
def test_hits_are_the_longest_prefix_of_whole_blocks_seen_before(prompts):
    cache = BlockCache(num_blocks=1000, block_tokens=4)
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        hashes = cache.hashes(ids(prompt))
        expected = 0
        while expected + 4 < len(prompt) and tuple(prompt[: expected + 4]) in seen:
            expected += 4
        assert cache.hit_tokens(hashes, len(prompt)) == expected
        cache.insert(hashes)
        seen |= {tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)}
        assert len(cache) == len(seen)


@given(PROMPTS, st.integers(1, 4))
def test_the_cache_is_never_over_its_size_and_keeps_what_was_used_last(prompts, size):
    cache = BlockCache(size, block_tokens=4)
    for prompt in prompts:
        hashes = cache.hashes(ids(prompt))
        cache.insert(hashes)
        assert len(cache) <= size
        kept = min(size, (len(prompt) - 1) // 4)
        assert cache.hit_tokens(hashes, len(prompt)) == kept * 4


async def _with_engine(shape: Shape, work):
    engine = Engine(shape)
    running = asyncio.create_task(engine.run())
    try:
        return await work(engine)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _gaps_ms(engine: Engine, sequence: Sequence) -> list[float]:
    """Times between the tokens of a sequence, the first from its arrival."""
    gaps, last = [], perf_counter()
    async for _ in engine.generate(sequence):
        gaps.append((perf_counter() - last) * 1e3)
        last = perf_counter()
    return gaps


def test_a_prefill_takes_its_time_and_slows_down_the_decodes_beside_it():
    # 100 tokens per step at 0.2 ms: a chunk takes 20 ms, a decode step alone 1 ms.
    shape = Shape(step_us=1000, prefill_us_per_token=200, max_batched_tokens=100)

    async def work(engine: Engine):
        decode = Sequence(ids([1] * 10), 60)
        decoding = asyncio.create_task(_gaps_ms(engine, decode))
        while decode.made < 20:
            await asyncio.sleep(0.001)
        prefill = await _gaps_ms(engine, Sequence(ids([2] * 400), 1))
        return await decoding, prefill

    decodes, prefill = asyncio.run(_with_engine(shape, work))
    assert prefill[0] >= 0.9 * 400 * 0.2
    slow = [gap for gap in decodes[1:] if gap > 15]
    assert len(slow) >= 4, "one for each chunk, more on a busy machine"
    assert min(decodes[1:]) < 15


def test_a_batch_costs_more_than_one_sequence():
    def cost_ns(decoding: int) -> int:
        engine = Engine(Shape(step_us=100, decode_us=10))
        sequences = [Sequence(ids([1]), 5) for _ in range(decoding)]
        for sequence in sequences:
            sequence.computed = 1
        return engine._cost_ns(dict.fromkeys(sequences, 1))

    assert cost_ns(1) == 110_000
    assert cost_ns(8) == 180_000


def test_whoever_leaves_takes_nothing_along():
    async def work(engine: Engine):
        stays = asyncio.create_task(_gaps_ms(engine, Sequence(ids([1] * 8), 50)))
        for prompt in ([2] * 8, [3] * 8):
            leaves = asyncio.create_task(
                _gaps_ms(engine, Sequence(ids(prompt), 1_000_000))
            )
            await asyncio.sleep(0.01)
            leaves.cancel()
        await stays
        return engine

    engine = asyncio.run(_with_engine(Shape(step_us=200), work))
    assert (engine.running, list(engine.waiting)) == ([], [])
    assert (engine.totals.finished, engine.totals.aborted) == (1, 2)


def test_no_more_run_at_once_than_allowed():
    async def work(engine: Engine):
        tasks = [
            asyncio.create_task(_gaps_ms(engine, Sequence(ids([n]), 5)))
            for n in range(1, 7)
        ]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(engine.running))
            await asyncio.sleep(0)
        return most

    assert asyncio.run(_with_engine(Shape(step_us=100, max_num_seqs=2), work)) == 2


def test_kv_from_elsewhere_is_neither_computed_nor_a_hit():
    async def work(engine: Engine):
        await _gaps_ms(engine, Sequence(ids([5] * 40), 2, received=39))
        return engine.totals

    totals = asyncio.run(_with_engine(Shape(), work))
    assert (totals.computed_tokens, totals.external_tokens) == (1, 39)
    assert (totals.prefix_cache_hits, totals.cached_tokens) == (0, 0)
