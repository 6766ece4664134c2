# SPDX-License-Identifier: Apache-2.0
"""Followers of a real BlockPool's index: by its listener, and by a wrapped class.

The wrapped class is the way of Dynamo's GPU Memory Service, written anew: it overrides
the three methods in which vLLM changes a block's entry, on the one pool.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvtax.engine.engine_process import serve

BLOCKS, BLOCK_SIZE = 32, 16
OPERATIONS = 1_500
# What their trace does, and how often; then what else vLLM does to the index.
ONE_NAME = {"allocate": 5, "name": 7, "free": 4, "touch": 1, "evict": 2, "reset": 1}
ALL = ONE_NAME | {"share": 3, "second name": 2, "other group": 2, "move": 1}
# An exploration that did one of these less often shows nothing.
FEWEST = 20
TIMED_BLOCKS = 512

# (key, block id), and what a store keeps of it.
Pair = tuple[bytes, int]


class Following:
    """Tokens and step of each cached pair, as the listener was called."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._step = self._ended = 0
        self.pairs: dict[Pair, tuple[int | None, int]] = {}

    def on_block_cached(self, key: bytes, block_id: int) -> None:
        block = self._pool.blocks[block_id]
        # Of a further name of a block vLLM keeps no number of tokens.
        tokens = block.block_hash_num_tokens if block.block_hash == key else None
        self.pairs[key, block_id] = tokens, self._step

    def on_block_evicted(self, key: bytes, block_id: int) -> None:
        del self.pairs[key, block_id]

    def on_cache_reset(self) -> None:
        self.pairs.clear()

    def begin_step(self) -> None:
        self._step += 1

    def end_step(self) -> None:
        self._ended = self._step

    def offered(self) -> dict[Pair, int | None]:
        """Return the pairs that a peer may read: their step has ended."""
        return {
            pair: tokens
            for pair, (tokens, step) in self.pairs.items()
            if step <= self._ended
        }


class Store:
    """Name and tokens of each block; it keeps one name of a block."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[bytes, int | None]] = {}


def wrap(pool: BlockPool, store: Store) -> None:
    """Have `store` follow the pool by a class of its own."""
    base = type(pool)

    class Wrapped(base):  # type: ignore[misc, valid-type]
        def _insert_block_hash(self, key: Any, block: Any, num_tokens: Any) -> None:
            super()._insert_block_hash(key, block, num_tokens)
            if block.block_hash == key:
                store.names[block.block_id] = bytes(key), block.block_hash_num_tokens
            else:
                store.names.pop(block.block_id, None)

        def _remove_cached_block_hashes(self, block: Any) -> Any:
            store.names.pop(block.block_id, None)
            return super()._remove_cached_block_hashes(block)

        def reset_prefix_cache(self) -> bool:
            done = super().reset_prefix_cache()
            if done:
                store.names.clear()
            return done

    pool.__class__ = Wrapped


def listen(pool: BlockPool) -> Following:
    """Follow the pool by one listener."""
    from vllm.v1.core.block_pool_listener import BlockPoolListener

    class Listener(Following, BlockPoolListener):
        pass

    listener = Listener(pool)
    pool.add_listener(listener)
    return listener


def pairs_of(pool: BlockPool) -> set[Pair]:
    """Walk the index."""
    return {
        (key, block_id)
        for key, of in pool.cached_block_hash_to_block._cache.items()
        for block_id in (of if isinstance(of, dict) else (of.block_id,))
    }


class Exploration:
    """Random operations on a pool that is followed in both ways, counted."""

    def __init__(self, seed: int, weights: dict[str, int]) -> None:
        self._random = random.Random(seed)
        self._operations = list(weights), list(weights.values())
        self.pool = BlockPool(BLOCKS, True, BLOCK_SIZE)
        self.store, self.listener = Store(), listen(self.pool)
        wrap(self.pool, self.store)
        self._held: list[Any] = []
        # Content of blocks, as a device would have written it by now.
        self._written: set[Pair] = set()
        self._names = 0
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        names, weights = self._operations
        for _ in range(OPERATIONS):
            (name,) = self._random.choices(names, weights)
            self.listener.begin_step()
            if getattr(self, "_" + name.replace(" ", "_"))():
                self.counts[name] += 1
            self._check()
            if self._random.random() < 0.5:
                self._written = pairs_of(self.pool)
                self.listener.end_step()
                self._check()
        self._restore()
        return self.counts

    def _check(self) -> None:
        pairs, counts = pairs_of(self.pool), self.counts
        self._written &= pairs
        named = {
            block.block_id: (block.block_hash, block.block_hash_num_tokens)
            for block in self.pool.blocks
            if block.block_hash is not None
        }
        offered = self.listener.offered()
        tokens = {
            block_id: (key, of)
            for (key, block_id), (of, _) in self.listener.pairs.items()
            if of is not None
        }
        counts["checks"] += 1
        counts["listener differs"] += set(self.listener.pairs) != pairs
        counts["listener has other tokens"] += tokens != named
        counts["offered, not computed"] += bool(set(offered) - self._written)
        counts["named, not computed"] += bool(pairs - self._written)
        counts["wrapper differs"] += self.store.names != named
        counts["wrapper has too much"] += bool(
            {(key, block_id) for block_id, (key, _) in self.store.names.items()} - pairs
        )

    def _restore(self) -> None:
        """Put what is offered into a new pool, as after a failover."""
        pool = BlockPool(BLOCKS, True, BLOCK_SIZE)
        follower = listen(pool)
        restored = {
            block_id: (key, tokens)
            for (key, block_id), tokens in self.listener.offered().items()
            if tokens is not None
        }
        blocks = [pool.blocks[block_id] for block_id in restored]
        for block in blocks:
            pool._insert_block_hash(*_entry(block, *restored[block.block_id]))
            pool.free_block_queue.remove(block)
        pool.free_block_queue.append_n(blocks)
        others = pool.get_new_blocks(BLOCKS - 1 - len(blocks))
        self.counts["restores"] += 1
        self.counts["restore differs"] += (
            set(follower.pairs) != pairs_of(pool)
            or {block.block_id for block in others} & restored.keys() != set()
            or follower.pairs.keys()
            != {(key, block_id) for block_id, (key, _) in restored.items()}
        )

    def _new_key(self, group: int = 0) -> Any:
        self._names += 1
        digest = hashlib.sha256(str(self._names).encode()).digest()
        return make_block_hash_with_group_id(BlockHash(digest), group)

    def _one_held(self, named: bool) -> Any:
        held = [one for one in self._held if (one.block_hash is not None) == named]
        return self._random.choice(held) if held else None

    def _name(self, key: Any = None, named: bool = False, group: int = 0) -> bool:
        block = self._one_held(named)
        if block is None:
            return False
        tokens = BLOCK_SIZE * self._random.randint(1, 7)
        self.pool._insert_block_hash(key or self._new_key(group), block, tokens)
        return True

    def _share(self) -> bool:
        keys = sorted({key for key, _ in pairs_of(self.pool)})
        return bool(keys) and self._name(self._random.choice(keys))

    def _second_name(self) -> bool:
        return self._name(named=True)

    def _other_group(self) -> bool:
        return self._name(group=1)

    def _move(self) -> bool:
        source, target = self._one_held(True), self._one_held(False)
        if source is None or target is None:
            return False
        self.pool.move_block_hashes(source, target)
        return True

    def _allocate(self) -> bool:
        count = self._random.randint(1, 4)
        if self.pool.get_num_free_blocks() < count:
            return False
        cached = {block_id for _, block_id in self.listener.pairs}
        blocks = self.pool.get_new_blocks(count)
        self.counts["reused"] += len(cached & {block.block_id for block in blocks})
        self._held += blocks
        return True

    def _free(self) -> bool:
        if not self._held:
            return False
        count = self._random.randint(1, len(self._held))
        freed, self._held = self._held[:count], self._held[count:]
        self.pool.free_blocks(freed)
        return True

    def _touch(self) -> bool:
        block = self._random.choice(self.pool.blocks[1:])
        if block.ref_cnt:
            return False
        self.pool.touch([block])
        self._held.append(block)
        return True

    def _evict(self) -> bool:
        ids = sorted({block_id for _, block_id in pairs_of(self.pool)})
        if not ids:
            return False
        self.pool.evict_blocks({self._random.choice(ids)})
        return True

    def _reset(self) -> bool:
        done = self.pool.reset_prefix_cache()
        self.counts["refused resets"] += not done
        return done


def _entry(block: Any, key: bytes, tokens: int | None) -> tuple[Any, Any, Any]:
    return key, block, tokens


def explore(way: str, seeds: int, all_operations: bool) -> dict[str, int]:
    """Run `seeds` explorations; return all counts.

    Raises RuntimeError if an operation was done too rarely.
    """
    weights = ALL if all_operations else ONE_NAME
    counts: Counter[str] = Counter()
    for seed in range(seeds):
        counts.update(Exploration(seed, weights).run())
    rare = [name for name in (*weights, "reused") if counts[name] < FEWEST]
    if rare:
        raise RuntimeError(f"done fewer than {FEWEST} times: {', '.join(rare)}")
    return dict(counts)


def time_blocks(way: str) -> tuple[float, float]:
    """Time ns per block that is cached, and that is handed out again."""
    pool = BlockPool(TIMED_BLOCKS + 1, True, BLOCK_SIZE)
    if way == "listener":
        listen(pool)
    if way == "wrapped":
        wrap(pool, Store())
    keys = [hashlib.sha256(str(number).encode()).digest() for number in range(512)]
    request = SimpleNamespace(block_hashes=[BlockHash(key) for key in keys])
    blocks = pool.get_new_blocks(TIMED_BLOCKS)
    clock = time.perf_counter_ns
    times = []
    began = clock()
    pool.cache_full_blocks(request, blocks, 0, TIMED_BLOCKS, BLOCK_SIZE, 0)
    times.append((clock() - began) / TIMED_BLOCKS)
    pool.free_blocks(blocks)
    began = clock()
    pool.get_new_blocks(TIMED_BLOCKS)
    times.append((clock() - began) / TIMED_BLOCKS)
    return times[0], times[1]


if __name__ == "__main__":
    _, way, socket = sys.argv[1:]
    serve(way, socket, explore, time_blocks)
