# SPDX-License-Identifier: Apache-2.0
"""A pair's greedy tokens equal a single instance's, so what is pulled is the KV.

Both instances of a pair are kv_both. One has the fixes and the other is upstream's, as
in a fleet that is patched one instance after the other, and each case runs in both
directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.harness.tiny.checkpoint import prompt
from tests.harness.tiny.server import BLOCK_TOKENS, Counters, TinyServer, Tokens
from tests.harness.tiny.servers import Reference, TinyServers, ready
from tests.releases import INSTALLED

from .pair import route

pytestmark = pytest.mark.e2e

LENGTHS = [
    1,
    2,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    2 * BLOCK_TOKENS,
    1000,
    4001,
]
PREFIX_TOKENS = 32 * BLOCK_TOKENS
# D computes the last token of a prompt again, to sample the next one from it. Only old
# releases count it among the computed ones, too, and a prompt of one token as cached.
COUNTS_AGAIN = INSTALLED == "0.18.1"


@dataclass(frozen=True)
class Pair:
    connector: str
    instances: tuple[TinyServer, TinyServer]
    reference: Reference

    async def check(self, p: TinyServer, d: TinyServer, prompts: list[Tokens]) -> None:
        """`prompts`, all at once, are answered as by a single instance."""
        expected = await self.reference.tokens(prompts)
        routes = (route(self.connector, p, d, prompt) for prompt in prompts)
        answers = await asyncio.gather(*routes)
        assert [answer.tokens for answer in answers] == expected


@pytest.fixture(scope="module", params=["mooncake", "nixl"])
def pair(request, lab: TinyServers, reference: Reference) -> Iterator[Pair]:
    both = (lab.instance(request.param, patched=patched) for patched in (False, True))
    with ready(*both) as instances:
        yield Pair(request.param, instances, reference)


@pytest.fixture(params=[1, -1], ids=["forth", "back"])
def direction(request) -> int:
    return request.param


async def test_tokens_are_those_of_a_single_instance_at_every_length(pair, direction):
    p, d = pair.instances[::direction]
    before_p, before_d = await p.counters(), await d.counters()
    for length in LENGTHS:
        await pair.check(p, d, [prompt(direction * 10_000 + length, length)])
    total, cached = sum(LENGTHS), int(COUNTS_AGAIN)
    # A prompt of one token is not pulled.
    again = len(LENGTHS) if COUNTS_AGAIN else 1
    await counted(d, before_d, total - 1, computed=again, cached=cached)
    await counted(p, before_p, computed=total, cached=cached)
    await asyncio.gather(p.settle(), d.settle())


async def test_only_what_the_decode_side_has_not_cached_is_pulled(pair, direction):
    p, d = pair.instances[::direction]
    before = await d.counters()
    shared = prompt(direction * 20_000, PREFIX_TOKENS)
    tails = [prompt(direction * 20_000 + i, i * 5) for i in range(1, 6)]
    await pair.check(p, d, [shared + tails[0]])
    await pair.check(p, d, [shared + tail for tail in tails[1:]])
    await counted(
        d,
        before,
        pulled=PREFIX_TOKENS + sum(map(len, tails)),
        computed=COUNTS_AGAIN * len(tails),
        cached=PREFIX_TOKENS * (len(tails) - 1),
    )
    await asyncio.gather(p.settle(), d.settle())


async def test_sixteen_at_once_in_both_directions(pair):
    one, other = pair.instances
    before = [await one.counters(), await other.counters()]
    forth = [prompt(30_000 + i, 40 + 61 * i) for i in range(8)]
    back = [prompt(40_000 + i, 33 + 47 * i) for i in range(8)]
    await asyncio.gather(pair.check(one, other, forth), pair.check(other, one, back))
    forth_tokens, back_tokens = sum(map(len, forth)), sum(map(len, back))
    await counted(one, before[0], back_tokens, forth_tokens + COUNTS_AGAIN * len(back))
    await counted(
        other, before[1], forth_tokens, back_tokens + COUNTS_AGAIN * len(forth)
    )
    await asyncio.gather(one.settle(), other.settle())


async def counted(
    instance: TinyServer,
    before: Counters,
    pulled: int = 0,
    computed: int = 0,
    cached: int = 0,
) -> None:
    """Raises AssertionError unless these are the prompt tokens since `before`."""
    # The counters come a moment after the answer.
    for _ in range(3000):
        since = await instance.counters() - before
        found = (since.pulled_tokens, since.computed_tokens, since.cached_tokens)
        if found == (pulled, computed, cached):
            return
        await asyncio.sleep(0.02)
    assert found == (pulled, computed, cached)
