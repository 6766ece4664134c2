# SPDX-License-Identifier: Apache-2.0
"""B reads A's prefix cache, and every answer has the right tokens."""

from __future__ import annotations

import asyncio
import socket

import pytest

from connectors.direct_read.bench.gated_servers import named
from connectors.direct_read.bench.gates import VALIDATE
from tests.harness.tiny.checkpoint import prompt
from tests.harness.tiny.server import BLOCK_TOKENS, SETTLE_DEADLINE_S

from .bench import LONG_TOKENS, SMALL_BLOCKS, full_blocks

pytestmark = pytest.mark.long

LENGTHS = [
    1,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    2 * BLOCK_TOKENS,
    1000,
    LONG_TOKENS,
]


@pytest.mark.parametrize("length", LENGTHS)
async def test_all_full_blocks_are_pulled(bench, length):
    asked = prompt(90_000 + length, length)
    await bench.prepare(asked)
    computed = (await bench.b.counters()).computed_tokens
    async with bench.pulled(full_blocks(asked)):
        await bench.right(bench.ask(asked), asked)
        left = length - full_blocks(asked) * BLOCK_TOKENS
        await bench.b.has(computed_tokens=computed + left)


async def test_nothing_is_pulled_of_what_the_peer_does_not_have(bench):
    asked = prompt(101_000, 500)
    async with bench.pulled(0):
        await bench.right(bench.ask(asked), asked)


async def test_what_the_peer_has_half_of_is_pulled_by_half(bench):
    asked = prompt(102_000, 1000)
    await bench.prepare(asked[:500])
    async with bench.pulled(500 // BLOCK_TOKENS):
        await bench.right(bench.ask(asked), asked)


async def test_what_is_here_is_not_pulled(bench):
    asked = prompt(103_000, 1000)
    await bench.prepare(asked)
    await bench.b.complete(asked[:400], 1)
    async with bench.pulled(full_blocks(asked) - 400 // BLOCK_TOKENS):
        await bench.right(bench.ask(asked), asked)


async def test_many_at_once_in_both_directions(bench):
    forth = [prompt(104_000 + i, 40 + 61 * i) for i in range(6)]
    back = [prompt(104_100 + i, 33 + 47 * i) for i in range(6)]
    await asyncio.gather(*map(bench.prepare, forth))
    await asyncio.gather(*(bench.b.complete(one, 1) for one in back))
    async with bench.pulled(sum(map(full_blocks, forth))):
        await asyncio.gather(
            *(bench.right(bench.ask(one), one) for one in forth),
            *(
                bench.right(bench.a.complete(one, kv_transfer_params=bench.b.peer), one)
                for one in back
            ),
        )
    await bench.a.settle()
    pulled = await bench.a.count("blocks_pulled")
    assert pulled == sum(map(full_blocks, back))


async def test_preempted_after_a_pull(bench):
    """A pulls, and runs out of blocks during the last answers."""
    # Each needs one more block for the second token of its answer.
    length = (SMALL_BLOCKS // 3 - 1) * BLOCK_TOKENS
    three = [prompt(104_200 + i, length) for i in range(3)]
    await bench.reference.tokens(three)
    for one in three:
        await bench.b.complete(one, 1)
    pulled = await bench.a.count("blocks_pulled")
    preemptions = await bench.a.metric("vllm:num_preemptions_total")
    pulls = asyncio.gather(
        *(bench.a.complete(one, kv_transfer_params=bench.b.peer) for one in three)
    )
    # Together: none is done before all of them have blocks and have read.
    async with bench.a.held_at(VALIDATE, pulls):
        await bench.a.has_used(sum(map(full_blocks, three)) / (SMALL_BLOCKS - 1))
        await asyncio.sleep(0.3)
    answers = await pulls
    expected = await bench.reference.tokens(three)
    assert [answer.tokens for answer in answers] == expected
    await bench.a.settle()
    assert await bench.a.metric("vllm:num_preemptions_total") > preemptions
    pulled = await bench.a.count("blocks_pulled") - pulled
    assert pulled == sum(map(full_blocks, three))


async def test_pulls_leave_room_for_each_other(bench):
    """A has blocks for what two requests pull, but not for the rest of either."""
    both = [prompt(104_300 + i, 200 * BLOCK_TOKENS) for i in range(2)]
    await bench.reference.tokens(both)
    for one in both:
        await bench.b.complete(one[: 140 * BLOCK_TOKENS], 1)
    answers = [
        asyncio.ensure_future(
            bench.right(bench.a.complete(one, kv_transfer_params=bench.b.peer), one)
        )
        for one in both
    ]
    async with bench.a.held_at(VALIDATE, asyncio.gather(*answers)) as both_right:
        await asyncio.sleep(0.3)
    await asyncio.wait_for(both_right, SETTLE_DEADLINE_S)


async def test_a_pull_is_not_stuck_behind_what_does_not_fit(bench):
    """The first request of the queue gets no answer to its lookup, and does not fit."""
    first, second = (prompt(104_400 + i, 200 * BLOCK_TOKENS) for i in range(2))
    await bench.reference.tokens([first, second])
    await bench.b.complete(second[: 140 * BLOCK_TOKENS], 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = named(silent.getsockname()[1])
        theirs = asyncio.ensure_future(
            bench.right(bench.a.complete(first, kv_transfer_params=peer), first)
        )
        await asyncio.sleep(0.5)
        pull = bench.a.complete(second, kv_transfer_params=bench.b.peer)
        async with bench.a.held_at(VALIDATE, bench.right(pull, second)) as ours:
            # The lookup has failed by then.
            await asyncio.sleep(3)
        await asyncio.wait_for(asyncio.gather(ours, theirs), SETTLE_DEADLINE_S)
