# SPDX-License-Identifier: Apache-2.0
"""mooncake_hash_sync's deltas: the worker's map is the pool's after every step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hash_sync_lab import cached_again, duplicate_evicted, watched_engine
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync
from vllm.v1.core.block_pool import BlockPool

PATCHES = ["mooncake_cpu_layout", "mooncake_hash_sync", "block_pool_delta_listener"]


@pytest.fixture(scope="module")
def told(model):
    return watched_engine(model, "deltas")


def test_the_workload_makes_the_map_change(told):
    _, witness = told
    assert witness.counts["steps"] > 1_500
    assert witness.counts["held"] > 50  # of 79 blocks, some of them duplicates
    assert witness.counts["evictions"] > 1_000
    assert witness.counts["duplicates"] > 20
    assert witness.counts["resets"] > 8


def test_each_key_has_the_very_block_that_a_lookup_in_the_pool_finds(told):
    _, witness = told
    assert witness.problems == []


def test_a_step_that_changes_nothing_ships_nothing(told):
    """Most steps cache no block."""
    _, witness = told
    assert 100 < witness.counts["shipped"] < witness.counts["steps"]


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_a_key_that_returns_in_another_block_between_two_steps_moves(told, how):
    case = cached_again(*told, how)
    assert case["same_keys"]
    assert case["worker_changed"]
    assert case["wrong"] == 0
    assert case["keys"] == 3


def test_the_eviction_of_one_of_two_blocks_with_a_key_is_shipped(told):
    case = duplicate_evicted(*told)
    assert case["still_cached_in_another"]
    assert not case["worker_kept"]
    assert case["wrong"] == 0


@pytest.mark.parametrize("source", ["walk", "deltas"])
def test_the_config_decides_and_not_which_patches_are_there(source):
    pool = BlockPool(4, True, 16)
    options = {"hash_sync": {"source": source}}
    config = SimpleNamespace(kv_connector_extra_config=options)
    found = hash_sync.block_hash_source(config, pool)
    listeners = pool.cached_block_hash_to_block.listeners
    if source == "walk":
        assert isinstance(found, hash_sync.BlockHashWalk)
        assert listeners == []
    else:
        assert listeners == [found]
