# SPDX-License-Identifier: Apache-2.0
"""mooncake_hash_sync: the worker's map is the pool's after every step.

The walk is right about the keys, and wrong about blocks where it must be.
"""

from __future__ import annotations

import pickle
import random
import re
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import hash_sync
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.block_pool_listener import BlockHashChanges

from kvtax.engine.connector import load_connector
from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine
from kvtax.proc.ports import reserve

CONFIGS = {"walk": "mooncake_both_hash_sync", "deltas": "mooncake_both_delta"}
NUM_BLOCKS = 80
SEEDS = 4
STEPS = 700


class Witness:
    """Watches the block pool and compares the worker's map with it after each step.

    `unseen` are the keys that a walk must get wrong: the block that the worker knows
    lost the key, but the key itself stayed in the pool, or left and came back between
    two steps.
    """

    def __init__(self, engine: NullEngine, source: str):
        self._compare = {
            "walk": self._compare_with_walk,
            "deltas": self._compare_with_pool,
        }[source]
        self._engine, self._source = engine, source
        self.pool: BlockPool = engine.core.scheduler.kv_cache_manager.block_pool
        self._connector = get_kv_transfer_group()
        worker = self._connector.connector_worker
        self.block_ids: dict[bytes, int] = worker.block_ids_by_hash
        self._fence = (
            engine.core.scheduler.connector.connector_scheduler.block_hash_fence
        )
        # What the step under way has cached: no reader may find it yet.
        self._new: set[tuple[bytes, int]] = set()
        self.unseen: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._watch()

    def _watch(self) -> None:
        insert, pop = BlockHashToBlockMap.insert, BlockHashToBlockMap.pop

        def watched_insert(block_map, key, block):
            duplicate = key in block_map._cache
            insert(block_map, key, block)
            if block_map is not self.pool.cached_block_hash_to_block:
                return
            self.counts["duplicates"] += duplicate
            self._new.add((key, block.block_id))
            if self.known().get(key) == block.block_id:
                self.unseen.discard(key)

        def watched_pop(block_map, key, block_id):
            block = pop(block_map, key, block_id)
            own = block_map is self.pool.cached_block_hash_to_block
            if own and block is not None:
                self.counts["evictions"] += 1
                if self.known().get(key) == block_id:
                    self.unseen.add(key)
            return block

        BlockHashToBlockMap.insert = watched_insert
        BlockHashToBlockMap.pop = watched_pop
        connector = self._engine.core.scheduler.connector
        build = connector.build_connector_meta

        def watched_build(output):
            metadata = pickle.loads(pickle.dumps(build(output)))
            self.counts["shipped"] += metadata.block_hash_delta is not None
            return metadata

        connector.build_connector_meta = watched_build

    def known(self) -> dict[bytes, int]:
        """The worker's map, and what the fence withholds from it."""
        unwritten = self._fence.unwritten.items()
        return self.block_ids | {key: block_id for key, (block_id, _) in unwritten}

    def reset(self) -> bool:
        done = self._engine.core.scheduler.reset_prefix_cache()
        if done:
            self.counts["resets"] += 1
            self.unseen |= self.known().keys()
        return done

    def holds(self, block_id: int, key: bytes) -> bool:
        return self.pool.blocks[block_id].block_hash == key

    def first_blocks(self) -> dict[bytes, int]:
        """The block that a lookup of each key finds."""
        block_map = self.pool.cached_block_hash_to_block
        return {k: block_map.get_one_block(k).block_id for k in block_map._cache}

    def step(self) -> None:
        scheduler = self._engine.core.scheduler
        if not scheduler.has_requests():
            return
        kv_transfer_state._KV_CONNECTOR_AGENT = self._connector
        self._new.clear()
        before = set(self.block_ids.items())
        self._engine.core.step()
        self.counts["steps"] += 1
        block_map = self.pool.cached_block_hash_to_block
        self.counts["held"] = max(self.counts["held"], len(block_map))
        early = self._new & self.block_ids.items()
        if self._source == "walk":
            # A key that leaves and comes back to its block is no change to it.
            early -= before
        if early:
            self._problem(f"{len(early)} known before the step has written them")
        self.counts["withheld"] += len(self._fence.unwritten)
        self._compare()

    def _problem(self, text: str) -> None:
        self.problems.append(f"step {self.counts['steps']}: {text}")

    def _compare_with_pool(self) -> None:
        block_ids, known = self.first_blocks(), self.known()
        if known != block_ids:
            differing = len(known.items() ^ block_ids.items())
            self._problem(f"{differing} differ from what a lookup finds")

    def _compare_with_walk(self) -> None:
        keys, known = self.first_blocks().keys(), self.known()
        self.unseen &= keys
        if known.keys() != keys:
            self._problem(
                f"{len(keys - known.keys())} keys missing, "
                f"{len(known.keys() - keys)} too many"
            )
        wrong = {k for k, block in known.items() if not self.holds(block, k)}
        if wrong != self.unseen:
            self._problem(
                f"{len(wrong - self.unseen)} wrong ids that the walk could see, "
                f"{len(self.unseen - wrong)} it corrected"
            )
        self.counts["wrong"] += len(wrong)

    def drain(self) -> None:
        while self._engine.core.scheduler.has_requests():
            self.step()


def watched_engine(model: Path, source: str) -> tuple[NullEngine, Witness]:
    """The engine of the config with that source, after a long random workload."""
    config = load_connector(CONFIGS[source]).kv_transfer_config
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    envs.VLLM_MOONCAKE_BOOTSTRAP_PORT = reserve(1)[0].bootstrap
    engine = NullEngine(model, {"kv_buffer_device": "cpu"} | config, NUM_BLOCKS)
    witness = Witness(engine, source)
    for seed in range(SEEDS):
        random_workload(engine, witness, seed)
    return engine, witness


def random_workload(engine: NullEngine, witness: Witness, seed: int) -> None:
    """Arrivals with shared prefixes, aborts, evictions and resets."""
    chooser = random.Random(seed)
    trunk = [chooser.randrange(1, 1_024) for _ in range(6 * BLOCK_SIZE)]
    # Whole blocks: the last one is computed again on a full hit, a duplicate.
    prompts = [trunk[: BLOCK_SIZE * blocks] for blocks in range(1, 7)]
    prompts += [
        trunk[: chooser.randrange(80)] + [chooser.randrange(1, 1_024) for _ in range(n)]
        for n in range(1, 90, 6)
    ]
    running: list[str] = []
    for _ in range(STEPS):
        if chooser.random() < 0.35:
            running.append(
                engine.add(chooser.choice(prompts), chooser.randrange(1, 50))
            )
        if running and chooser.random() < 0.05:
            engine.core.abort_requests([running.pop(chooser.randrange(len(running)))])
        if chooser.random() < 0.02:
            witness.pool.evict_blocks({chooser.randrange(1, NUM_BLOCKS)})
        if chooser.random() < 0.01:
            witness.drain()
            assert witness.reset()
        witness.step()
    witness.drain()
    assert witness.reset()


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


def source_of(pool: BlockPool, **extra_config):
    config = SimpleNamespace(kv_connector_extra_config=extra_config)
    return hash_sync.block_hash_fence(config, pool)


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
    walked, reported = (synced(source)[1].counts for source in SOURCES)
    assert walked["shipped"] == walked["steps"]
    assert 100 < reported["shipped"] < reported["steps"]


class Source:
    """Changes of a pool, as a test gives them."""

    def __init__(self) -> None:
        self.changes: BlockHashChanges | None = None

    @property
    def has_changes(self) -> bool:
        return self.changes is not None

    def take(self) -> BlockHashChanges | None:
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
            changes = BlockHashChanges(bool(cleared), cached or {}, list(evicted))
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


def test_the_config_decides_and_not_which_patches_are_there(pool):
    extra = {"mooncake_protocol": "tcp", "unknown": 1}
    walk = source_of(pool, hash_sync={"source": "walk"}, **extra)
    assert isinstance(walk.source, hash_sync.BlockHashWalk)
    deltas = source_of(pool, hash_sync={"source": "deltas"})
    assert pool.cached_block_hash_to_block.listeners == [deltas.source]


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_an_option_that_is_not_one_is_refused_with_what_to_write(name, pool):
    with pytest.raises(ValueError, match=re.escape(HOW_TO_ASK)):
        source_of(pool, **WRONG_OPTIONS[name])


def test_without_the_listener_the_walk_works_and_deltas_name_its_patch(
    pool, monkeypatch
):
    monkeypatch.delattr(BlockPool, "add_listener")
    walk = source_of(pool, hash_sync={"source": "walk"})
    assert walk.begin_step().cached == {}
    with pytest.raises(ValueError, match="block_pool_delta_listener"):
        source_of(pool, hash_sync={"source": "deltas"})


def test_a_worker_knows_no_block_after_its_tracker_was_detached(pool):
    fence = source_of(pool, hash_sync={"source": "deltas"})
    block_ids: dict[bytes, int] = {}

    def step(*hashes: bytes) -> None:
        """A step that caches blocks under the hashes."""
        if hashes:
            request = SimpleNamespace(block_hashes=list(hashes))
            blocks = pool.get_new_blocks(len(hashes))
            pool.cache_full_blocks(request, blocks, 0, len(hashes), 16, 0)
        if (delta := fence.begin_step()) is not None:
            delta.apply_to(block_ids)
        fence.end_step()

    step(b"a")
    step()
    assert len(block_ids) == 1
    fence.source._changed = None  # so that it raises
    step(b"b")
    assert block_ids == {}
    step()
    assert block_ids == {}


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
