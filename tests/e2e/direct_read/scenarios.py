# SPDX-License-Identifier: Apache-2.0
"""What the scenarios of these tests share: A's size, B's moments, evictions."""

from __future__ import annotations

import asyncio

from costs.direct_read.gates import LOOKUP, MID_READ, READ, VALIDATE
from lab.tiny.checkpoint import prompt

from .bench import ReadBench

# Blocks of A: two prompts of LONG_TOKENS are more than it can cache.
SMALL_BLOCKS = 300
LONG_TOKENS = 4001
# Where B can be held in a pull, in order.
MOMENTS = [LOOKUP, READ, MID_READ, VALIDATE]


def run(scenario) -> None:
    asyncio.run(scenario())


async def evict_all(bench: ReadBench, seed: int) -> None:
    for number in range(2):
        await bench.a.complete(prompt(seed + number, LONG_TOKENS), 1)
