# SPDX-License-Identifier: Apache-2.0
"""The block pool with block_pool_bounded_hashes caches what upstream's caches."""

from __future__ import annotations

import inspect

import pytest
from growth_lab import QUICK, THOROUGH
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from costs.growth.variants import before_and_after

PATCHES = ["block_pool_bounded_hashes"]
MODULE = "vllm.v1.core.block_pool"
HASH_TOKENS, MOST_BLOCKS = 4, 24
# How many blocks each chunk adds, which blocks are null, and which are masked out.
CHUNKS = st.lists(st.integers(1, 7), min_size=1, max_size=8)
NULLS = st.sets(st.integers(0, MOST_BLOCKS - 1), max_size=4)


def explore(hashes_per_block: int, effort, edit: tuple[str, str] | None = None) -> int:
    """How many blocks were cached. Raises AssertionError where the two differ."""
    modules = before_and_after(MODULE, edit)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    block_tokens = HASH_TOKENS * hashes_per_block
    cached = 0

    @effort
    @given(CHUNKS, NULLS, NULLS)
    def run(chunks: list[int], nulls: set[int], masked: set[int]) -> None:
        nonlocal cached
        request = Request(
            request_id="r",
            prompt_token_ids=list(range(MOST_BLOCKS * block_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=None,
            block_hasher=hasher,
        )
        pools = [
            module.BlockPool(MOST_BLOCKS + 1, True, HASH_TOKENS, True)
            for module in modules
        ]
        tables = [pool.get_new_blocks(MOST_BLOCKS) for pool in pools]
        done = 0
        for chunk in chunks:
            full = min(done + chunk, MOST_BLOCKS)
            for pool, table in zip(pools, tables, strict=True):
                blocks = [
                    pool.null_block if index in nulls else block
                    for index, block in enumerate(table)
                ]
                more = {}
                if "block_mask" in inspect.signature(pool.cache_full_blocks).parameters:
                    mask = [index not in masked for index in range(done, full)]
                    more["block_mask"] = mask
                pool.cache_full_blocks(
                    request, blocks, done, full, block_tokens, 0, **more
                )
            done = full
            seen = [[block.block_hash for block in table] for table in tables]
            assert seen[0] == seen[1]
            keys = [list(pool.cached_block_hash_to_block._cache) for pool in pools]
            assert keys[0] == keys[1]
            events = [pool.take_events() for pool in pools]
            assert events[0] == events[1]
        cached += len(keys[0])

    run()
    return cached


@pytest.mark.parametrize("hashes_per_block", [1, 3])
def test_map_blocks_and_events_are_upstreams(hashes_per_block):
    """In chunks, with null blocks and masks, blocks of one hash or of three."""
    assert explore(hashes_per_block, THOROUGH) > 1_000


def test_a_bound_that_starts_elsewhere_is_noticed():
    edit = ("block_hashes[num_cached_blocks:num_full", "block_hashes[0:num_full")
    with pytest.raises(AssertionError):
        explore(1, QUICK, edit)
