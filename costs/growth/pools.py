# SPDX-License-Identifier: Apache-2.0
"""Block pools before and after block_pool_bounded_hashes, on a prompt's first chunk."""

from __future__ import annotations

import time
from random import Random

import numpy as np

from costs.growth.variants import before_and_after

# A chunk of a prompt that is computed in one step.
CHUNK_TOKENS = 2_048
HASH_TOKENS = 16


class PoolBench:
    """Both versions; a block has as many hashes as its group's tokens ask for."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.modules = before_and_after("vllm.v1.core.block_pool")
        self.order = Random(0)


class Prompt:
    """What the pool asks of a request: made-up hashes that no other one has."""

    def __init__(self, number: int, tokens: int) -> None:
        self.block_hashes = [
            f"{number}-{index}".encode().rjust(32)
            for index in range(tokens // HASH_TOKENS)
        ]


def time_first_chunk(
    bench: PoolBench, _running: int, context_tokens: int, steps: int
) -> np.ndarray:
    """us of `cache_full_blocks` for a prompt's first chunk, before and after the fix.

    (2, steps): each step is another prompt of `context_tokens`.
    """
    blocks = CHUNK_TOKENS // bench.block_tokens
    times_us = np.zeros((2, steps))
    pools = [
        module.BlockPool(steps * blocks + 1, True, HASH_TOKENS)
        for module in bench.modules
    ]
    for step in range(steps):
        prompt = Prompt(step, context_tokens)
        for version in bench.order.sample((0, 1), 2):
            table = pools[version].get_new_blocks(blocks)
            began_ns = time.perf_counter_ns()
            pools[version].cache_full_blocks(
                prompt, table, 0, blocks, bench.block_tokens, 0
            )
            times_us[version, step] = (time.perf_counter_ns() - began_ns) / 1e3
    return times_us
