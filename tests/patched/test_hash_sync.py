# SPDX-License-Identifier: Apache-2.0
"""mooncake_hash_sync: the worker's map is the pool's after every step.

The walk is right about the keys, and wrong about blocks where it must be.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache, partial
from types import SimpleNamespace

import pytest
from hash_sync_lab import cached_again, duplicate_evicted, watched_engine
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync
from vllm.v1.core.block_pool import BlockPool

PATCHES = ["mooncake_cpu_layout", "mooncake_hash_sync", "block_pool_delta_listener"]
SOURCES = ["walk", "deltas"]
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
def synced(model):
    """(engine, witness) after a long workload, by source."""
    return cache(partial(watched_engine, model))


def source_of(pool: BlockPool, module=hash_sync, **extra_config):
    config = SimpleNamespace(kv_connector_extra_config=extra_config)
    return module.block_hash_fence(config, pool)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, True, 16)


@pytest.mark.parametrize("source", SOURCES)
def test_the_worker_has_the_pools_keys_and_blocks_after_every_step(synced, source):
    """By the walk, wrong are exactly the ids whose change no walk can see."""
    _, witness = synced(source)
    assert witness.problems == []
    # Or the exclusion excluded nothing.
    assert (witness.counts["wrong"] > 0) == (source == "walk")
    # The workload made the map change.
    assert witness.counts["steps"] > 1_500
    assert witness.counts["held"] > 50  # of 79 blocks, some of them duplicates
    assert witness.counts["evictions"] > 1_000
    assert witness.counts["duplicates"] > 20
    assert witness.counts["resets"] > 8
    assert witness.counts["withheld"] > 1_000


def test_the_walk_ships_in_every_step_and_deltas_only_changes(synced):
    """Most steps cache no block."""
    walked, told = (synced(source)[1].counts for source in SOURCES)
    assert walked["shipped"] == walked["steps"]
    assert 100 < told["shipped"] < told["steps"]


class Source:
    """Changes of a pool, as a test gives them."""

    def __init__(self) -> None:
        self.changes: hash_sync.BlockHashDelta | None = None

    def take(self) -> hash_sync.BlockHashDelta | None:
        changes, self.changes = self.changes, None
        return changes


class Fenced:
    """A worker's map behind a fence; `step` says what each step caches and evicts."""

    def __init__(self) -> None:
        self.source, self.block_ids = Source(), {}
        self._fence = hash_sync.StepFence(self.source)
        self.end = self._fence.end_step

    def begin(self, cached=None, evicted=(), cleared=()) -> dict[str, int]:
        if cached or evicted or cleared:
            changes = hash_sync.BlockHashDelta(
                bool(cleared), cached or {}, list(evicted)
            )
            self.source.changes = changes
        if (delta := self._fence.begin_step()) is not None:
            delta.apply_to(self.block_ids)
        return self.block_ids


def test_a_block_is_known_when_its_step_has_ended_also_where_steps_overlap():
    fenced = Fenced()
    assert fenced.begin({"a": 1}) == {}
    assert fenced.begin({"b": 2}) == {}
    assert fenced.begin() == {}
    fenced.end()
    assert fenced.begin() == {"a": 1}
    fenced.end()
    fenced.end()
    assert fenced.begin({"c": 3}) == {"a": 1, "b": 2}


@pytest.mark.parametrize("forget", ["evicted", "cleared"])
def test_a_block_that_is_gone_before_its_step_has_ended_is_never_known(forget):
    """As of a request that is aborted."""
    fenced = Fenced()
    fenced.begin({"a": 1})
    assert fenced.begin(**{forget: ["a"]}) == {}
    fenced.end()
    fenced.end()
    assert fenced.begin() == fenced.begin() == {}


def test_a_key_that_moves_finds_nothing_until_its_new_block_is_written():
    fenced = Fenced()
    fenced.begin({"a": 1})
    fenced.end()
    assert fenced.begin() == {"a": 1}
    fenced.end()
    assert fenced.begin({"a": 2}) == {}
    fenced.end()
    assert fenced.begin() == {"a": 2}


def test_steps_without_changes_ship_nothing():
    fence = hash_sync.StepFence(Source())
    assert fence.begin_step() is fence.begin_step() is None


@pytest.mark.parametrize("how", ["evicted", "reset"])
def test_a_key_that_returns_in_another_block_moves_and_the_walk_misses_it(synced, how):
    for source in SOURCES:
        case = cached_again(*synced(source), how)
        assert case["same_keys"] and case["keys"] == 3
        assert case["worker_changed"] == (source == "deltas")
        assert case["wrong"] == (3 if source == "walk" else 0)


def test_the_eviction_of_one_of_two_blocks_with_a_key_is_missed_by_the_walk_alone(
    synced,
):
    for source in SOURCES:
        case = duplicate_evicted(*synced(source))
        assert case["still_cached_in_another"]
        assert case["worker_kept"] == (source == "walk")
        assert case["wrong"] == (source == "walk")


def test_the_config_decides_and_not_which_patches_are_there(pool):
    extra = {"mooncake_protocol": "tcp", "unknown": 1}
    walk = source_of(pool, hash_sync={"source": "walk"}, **extra)
    assert isinstance(walk.source, hash_sync.BlockHashWalk)
    deltas = source_of(pool, hash_sync={"source": "deltas"})
    assert pool.cached_block_hash_to_block.listeners == (deltas.source,)


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_an_option_that_is_not_one_is_refused_with_what_to_write(name, pool):
    with pytest.raises(ValueError, match=re.escape(HOW_TO_ASK)):
        source_of(pool, **WRONG_OPTIONS[name])


def test_without_the_listener_the_walk_works_and_deltas_name_its_patch(
    pool, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm.v1.core.block_pool_listener", None)
    spec = importlib.util.spec_from_file_location("alone", hash_sync.__file__)
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "alone", alone)
    spec.loader.exec_module(alone)
    assert (
        source_of(pool, alone, hash_sync={"source": "walk"}).begin_step().cached == {}
    )
    with pytest.raises(ValueError, match="block_pool_delta_listener"):
        source_of(pool, alone, hash_sync={"source": "deltas"})


def test_a_connector_that_is_not_given_the_pool_does_not_pass_for_a_cheap_one(synced):
    """As inside MultiConnector, which hands the block pool to nobody."""
    engine, _ = synced("walk")
    connector = engine.core.scheduler.connector.connector_scheduler
    fence, connector.block_hash_fence = connector.block_hash_fence, None
    try:
        with pytest.raises(RuntimeError, match="block pool"):
            connector.build_connector_meta(None)
    finally:
        connector.block_hash_fence = fence
