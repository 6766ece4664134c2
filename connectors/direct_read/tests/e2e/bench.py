# SPDX-License-Identifier: Apache-2.0
"""Three servers that read from each other, and the tokens to expect of them.

What their tests share: A's size, B's moments, evictions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from connectors.direct_read.bench.gated_servers import GatedServer
from connectors.direct_read.bench.gates import LOOKUP, MID_READ, READ, VALIDATE
from tests.harness.tiny import (
    BLOCK_TOKENS,
    SETTLE_DEADLINE_S,
    Answer,
    Reference,
    Tokens,
    prompt,
)

# Blocks of A: two prompts of LONG_TOKENS are more than it can cache.
SMALL_BLOCKS = 300
LONG_TOKENS = 4001
# Where B can be held in a pull, in order.
MOMENTS = [LOOKUP, READ, MID_READ, VALIDATE]


@dataclass(frozen=True)
class ReadBench:
    """`b` reads from `a`; `foreign` has other weights under another name.

    `a` has its connector in a MultiConnector, and a small cache; `b` has the same
    checkpoint at another path.
    """

    a: GatedServer
    b: GatedServer
    foreign: GatedServer
    reference: Reference

    async def prepare(self, asked: Tokens) -> None:
        """Have A cache it, and the reference know what follows."""
        await asyncio.gather(self.reference.tokens([asked]), self.a.complete(asked, 1))

    def ask(self, asked: Tokens, peer: dict[str, Any] | None = None) -> Awaitable:
        return self.b.complete(asked, kv_transfer_params=peer or self.a.peer)

    async def right(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens == expected

    async def wrong(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        """For negative controls."""
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens != expected

    @asynccontextmanager
    async def pulled(self, blocks: int) -> AsyncIterator[None]:
        """B has pulled so many blocks, as vLLM counts and as the connector does."""
        before = await self.counted()
        yield
        await self.b.settle()
        since = [
            now - then for now, then in zip(await self.counted(), before, strict=True)
        ]
        assert since == [blocks * BLOCK_TOKENS, blocks], f"{since} of {blocks} blocks"

    async def counted(self) -> tuple[int, int]:
        """Tokens that B has pulled, and blocks."""
        pulled_tokens = (await self.b.counters()).pulled_tokens
        return pulled_tokens, await self.b.count("blocks_pulled")

    async def well(self, seed: int) -> None:
        """B holds nothing, and reads from A: the first time unless A has failed it.

        Then it leaves A alone for a while, and so may Mooncake.
        """
        await self.b.settle()
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        pulled = 0
        while not pulled:
            assert time.monotonic() < deadline_s
            seed += 1
            asked = prompt(seed, 500)
            await self.prepare(asked)
            before, _ = await self.counted()
            await self.right(self.ask(asked), asked)
            await self.b.settle()
            pulled = (await self.counted())[0] - before
        assert pulled == full_blocks(asked) * BLOCK_TOKENS


async def evict_all(bench: ReadBench, seed: int) -> None:
    for number in range(2):
        await bench.a.complete(prompt(seed + number, LONG_TOKENS), 1)


def full_blocks(asked: Tokens) -> int:
    """How many blocks of it can be pulled: the last token is computed."""
    return (len(asked) - 1) // BLOCK_TOKENS
