# SPDX-License-Identifier: Apache-2.0
"""mooncake_hash_sync's walk: right about the keys, and where it must be wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hash_sync_lab import cached_again, duplicate_evicted, watched_engine
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync
from vllm.v1.core.block_pool import BlockPool

PATCHES = ["mooncake_cpu_layout", "mooncake_hash_sync"]
HOW_TO_ASK = '"hash_sync": {"source": "walk"} or {"source": "deltas"}'
WRONG_OPTIONS = {
    "no table": {},
    "misspelt table": {"hashsync": {"source": "walk"}},
    "no table but a word": {"hash_sync": "walk"},
    "no source": {"hash_sync": {}},
    "misspelt source": {"hash_sync": {"source": "wlak"}},
    "misspelt key": {"hash_sync": {"sourc": "walk"}},
    "unknown option beside the source": {"hash_sync": {"source": "walk", "serve": 1}},
    "the option of old": {"serve_direct_reads": True, "hash_sync": {"source": "walk"}},
}


@pytest.fixture(scope="module")
def walked(model):
    return watched_engine(model, "walk")


def source_of(**extra_config):
    config = SimpleNamespace(kv_connector_extra_config=extra_config)
    return hash_sync.block_hash_source(config, BlockPool(4, True, 16))


def test_the_workload_makes_the_map_change(walked):
    _, witness = walked
    assert witness.counts["steps"] > 1_500
    assert witness.counts["held"] > 50  # of 79 blocks, some of them duplicates
    assert witness.counts["evictions"] > 1_000
    assert witness.counts["duplicates"] > 20
    assert witness.counts["resets"] > 8


def test_every_step_ships_whether_or_not_anything_changed(walked):
    _, witness = walked
    assert witness.counts["shipped"] == witness.counts["steps"]


def test_the_worker_has_the_pools_keys_and_blocks_that_hold_them(walked):
    """After every step; wrong are exactly the ids whose change no walk can see."""
    _, witness = walked
    assert witness.problems == []
    assert witness.counts["wrong"] > 0  # or the exclusion excluded nothing


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_a_key_that_returns_in_another_block_between_two_steps_is_missed(walked, how):
    case = cached_again(*walked, how)
    assert case["same_keys"]
    assert not case["worker_changed"]
    assert case["wrong"] == case["keys"] == 3


def test_the_eviction_of_one_of_two_blocks_with_a_key_is_missed(walked):
    case = duplicate_evicted(*walked)
    assert case["still_cached_in_another"]
    assert case["worker_kept"]
    assert case["wrong"] == 1


def test_options_of_others_are_none_of_its_business():
    extra = {"mooncake_protocol": "tcp", "unknown": 1}
    source = source_of(hash_sync={"source": "walk"}, **extra)
    assert isinstance(source, hash_sync.BlockHashWalk)


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_an_option_that_is_not_one_is_refused_with_what_to_write(name):
    with pytest.raises(ValueError, match=re.escape(HOW_TO_ASK)):
        source_of(**WRONG_OPTIONS[name])


def test_deltas_without_the_listener_are_refused_with_the_patchs_name():
    with pytest.raises(ValueError, match="block_pool_delta_listener"):
        source_of(hash_sync={"source": "deltas"})


def test_a_connector_that_is_not_given_the_pool_does_not_pass_for_a_cheap_one(walked):
    """As inside MultiConnector, which hands the block pool to nobody."""
    engine, _ = walked
    connector = engine.core.scheduler.connector.connector_scheduler
    source, connector.block_hash_source = connector.block_hash_source, None
    try:
        with pytest.raises(RuntimeError, match="block pool"):
            connector.build_connector_meta(None)
    finally:
        connector.block_hash_source = source
