# SPDX-License-Identifier: Apache-2.0
"""A real engine with Mooncake's connector, its block pool against the worker's map.

Metadata is pickled on its way to the worker, as it is between processes. There may be
several engines in the process; each steps with its own connector.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path

from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

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

    def write(self) -> None:
        """Let the worker know of what has been written: in the step after."""
        self._engine.add([1], 1)
        self.step()

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


def cached_again(engine: NullEngine, witness: Witness, forget: str) -> dict:
    """A prompt's keys leave the pool, and return in other blocks before the next step.

    They leave because they are "evicted", or by a "reset" of the cache.
    """
    start_over(engine, witness)
    prompt = [900 + n for n in range(3 * BLOCK_SIZE + 1)]
    engine.add(prompt, 1)
    witness.drain()
    witness.write()
    before = dict(witness.block_ids)
    if forget == "evicted":
        evict_all(witness)
    else:
        assert witness.reset()
    engine.add(prompt, 1)
    witness.step()
    witness.write()
    return {
        "keys": len(before),
        "same_keys": before.keys()
        == set(witness.pool.cached_block_hash_to_block._cache),
        "worker_changed": witness.block_ids != before,
        "wrong": sum(not witness.holds(b, k) for k, b in witness.block_ids.items()),
    }


def duplicate_evicted(engine: NullEngine, witness: Witness) -> dict:
    """Two blocks have the same hash, and the one that the worker knows is evicted."""
    start_over(engine, witness)
    prompt = [700 + n for n in range(2 * BLOCK_SIZE)]
    engine.add(prompt, 30)
    witness.step()
    engine.add(prompt, 30)
    witness.step()
    ((key, copies),) = (
        (key, blocks)
        for key, blocks in witness.pool.cached_block_hash_to_block._cache.items()
        if isinstance(blocks, dict)
    )
    witness.write()
    known = witness.block_ids[key]
    witness.pool.evict_blocks({known})
    witness.step()
    witness.write()
    (left,) = set(copies) - {known}
    return {
        "copies": len(copies) + 1,
        "worker_kept": witness.block_ids[key] == known,
        "still_cached_in_another": witness.holds(left, key),
        "wrong": sum(not witness.holds(b, k) for k, b in witness.block_ids.items()),
    }


def evict_all(witness: Witness) -> None:
    witness.pool.evict_blocks(set(witness.block_ids.values()))


def start_over(engine: NullEngine, witness: Witness) -> None:
    """An idle engine whose prefix cache, and the worker's map, are empty."""
    witness.drain()
    assert witness.reset()
    engine.add([1], 1)
    witness.drain()
