# SPDX-License-Identifier: Apache-2.0
"""What a listener of the real block pool is told, and what a tracker makes of it.

Each case takes a listener_variant.Variant and asserts.
"""

from __future__ import annotations

from types import SimpleNamespace

from listener_machine import HASHER
from listener_variant import (
    BLOCK_SIZE,
    Variant,
    first_blocks,
    pairs_held,
)
from vllm import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

NUM_BLOCKS = 8


def cache(pool: BlockPool, *keys: bytes) -> list[KVCacheBlock]:
    """New blocks of the pool, in use, one cached under each key (of group 0)."""
    blocks = pool.get_new_blocks(len(keys))
    request = SimpleNamespace(block_hashes=list(keys))
    pool.cache_full_blocks(request, blocks, 0, len(keys), BLOCK_SIZE, 0)
    return blocks


def ids(blocks: list[KVCacheBlock]) -> set[int]:
    return {block.block_id for block in blocks}


class Reader:
    """A map from key to block id, kept by taking what a source has to tell."""

    def __init__(self, source) -> None:
        self._source = source
        self.block_ids: dict[bytes, int] = {}
        self.read()

    def read(self) -> dict[bytes, int]:
        changes = self._source.take()
        if changes is not None:
            changes.apply_to(self.block_ids)
        return self.block_ids


def each_block_is_told_once_when_cached_and_once_when_evicted(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    replica = variant.listen(pool)
    blocks = cache(pool, b"a", b"b", b"a")
    pool.touch(blocks)
    pool.free_blocks(blocks)
    pairs = [(block.block_hash, block.block_id) for block in blocks]
    assert replica.heard == [("cached", *pair) for pair in pairs]
    pool.free_blocks(blocks)
    pool.evict_blocks(ids(blocks))
    pool.evict_blocks(ids(blocks))
    told = replica.heard[len(pairs) :]
    assert sorted(told) == sorted(("evicted", *pair) for pair in pairs)
    assert replica.pairs == set()


def all_subscribers_hear_the_same_in_the_same_order(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    replicas = [variant.listen(pool) for _ in range(3)]
    for _ in range(3):
        pool.free_blocks(cache(pool, b"a", b"b", b"a", b"c"))
    assert pool.reset_prefix_cache()
    pool.free_blocks(cache(pool, b"d"))
    assert len(replicas[0].heard) > 15
    assert replicas[0].heard == replicas[1].heard == replicas[2].heard


def a_late_listener_first_receives_everything_already_cached(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    blocks = cache(pool, b"a", b"b", b"a", b"a")
    pool.evict_blocks({blocks[1].block_id})
    replica = variant.listen(pool)
    assert {call[0] for call in replica.heard} == {"cached"}
    assert len(replica.heard) == 3
    assert replica.pairs == pairs_held(pool)
    assert Reader(variant.tracker(pool)).block_ids == first_blocks(pool) != {}


def listeners_of_one_pool_hear_nothing_of_another(variant: Variant):
    pools = [variant.pool(NUM_BLOCKS) for _ in range(2)]
    replicas = [variant.listen(pool) for pool in pools]
    trackers = [variant.tracker(pool) for pool in pools]
    pools[0].free_blocks(cache(pools[0], b"a", b"a"))
    assert pools[0].reset_prefix_cache()
    assert replicas[1].heard == []
    assert trackers[1].take() is None
    cache(pools[1], b"b")
    assert [call[0] for call in replicas[0].heard] == ["cached", "cached", "reset"]
    assert replicas[1].pairs == pairs_held(pools[1])


def without_prefix_caching_no_block_is_told(variant: Variant):
    manager = variant.manager(NUM_BLOCKS, caching=False)
    pool = manager.block_pool
    replica, tracker = variant.listen(pool), variant.tracker(pool)
    for name in ("one", "two", "three"):
        params = SamplingParams(max_tokens=1)
        request = Request(name, [1] * 10, params, None, block_hasher=HASHER)
        assert request.block_hashes
        assert manager.allocate_slots(request, 10) is not None
        manager.free(request)
    assert replica.heard == []
    assert tracker.take() is None
    assert manager.reset_prefix_cache()
    assert replica.heard == [("reset",)]


def a_reset_is_told_and_subscribers_outlive_it(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    replica, reader = variant.listen(pool), Reader(variant.tracker(pool))
    for key in (b"a", b"b", b"c"):
        pool.free_blocks(cache(pool, key, key))
        assert replica.pairs == pairs_held(pool)
        assert reader.read() == first_blocks(pool) != {}
        assert pool.reset_prefix_cache()
        assert replica.heard[-1] == ("reset",)
        assert replica.pairs == set()
        assert reader.read() == {}


def a_refused_reset_is_not_told(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    replica, reader = variant.listen(pool), Reader(variant.tracker(pool))
    cache(pool, b"a")
    assert not pool.reset_prefix_cache()
    assert [call[0] for call in replica.heard] == ["cached"]
    assert reader.read() == first_blocks(pool) != {}


def nothing_changed_is_none_and_a_change_is_taken_once(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    tracker = variant.tracker(pool)
    assert tracker.take() is None
    blocks = cache(pool, b"a", b"b")
    assert set(tracker.take().cached) == {block.block_hash for block in blocks}
    assert tracker.take() is None
    # A lookup, a second user, and the end of both, change nothing.
    pool.touch(blocks)
    pool.free_blocks(blocks)
    pool.free_blocks(blocks)
    assert tracker.take() is None
    assert pool.reset_prefix_cache()
    assert tracker.take().cleared
    assert tracker.take() is None


def what_comes_and_goes_between_takes_is_not_shipped_as_cached(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    tracker = variant.tracker(pool)
    (block,) = cache(pool, b"a")
    key = block.block_hash
    pool.evict_blocks({block.block_id})
    changes = tracker.take()
    assert (changes.cleared, changes.cached, changes.evicted) == (False, {}, [key])
    changes.apply_to({})  # a map that never had the key stays as it is


def a_key_cached_again_in_another_block_is_what_only_the_walk_misses(variant: Variant):
    for forget in ("evict", "reset"):
        pool = variant.pool(NUM_BLOCKS)
        pool.free_blocks(cache(pool, b"a"))
        walked = Reader(variant.walk(pool))
        tracked = Reader(variant.tracker(pool))
        before = dict(tracked.block_ids)
        if forget == "evict":
            pool.evict_blocks(set(before.values()))
        else:
            assert pool.reset_prefix_cache()
        cache(pool, b"a")
        assert first_blocks(pool).keys() == before.keys()
        assert tracked.read() == first_blocks(pool) != before
        assert walked.read() == before


def of_two_blocks_with_a_key_an_evicted_one_is_what_only_the_walk_misses(
    variant: Variant,
):
    pool = variant.pool(NUM_BLOCKS)
    first, second = cache(pool, b"a", b"a")
    walked = Reader(variant.walk(pool))
    tracked = Reader(variant.tracker(pool))
    key = first.block_hash
    assert walked.block_ids == tracked.block_ids == {key: first.block_id}
    pool.evict_blocks({first.block_id})
    assert tracked.read() == {key: second.block_id}
    assert walked.read() == {key: first.block_id}
    pool.evict_blocks({second.block_id})
    assert tracked.read() == {}


def a_tracker_that_is_never_taken_holds_three_pools_of_keys_at_most(variant: Variant):
    pool = variant.pool(NUM_BLOCKS)
    tracker = variant.tracker(pool)
    reader = Reader(tracker)
    pool.free_blocks(cache(pool, b"known"))
    reader.read()
    most = 0
    for number in range(50 * NUM_BLOCKS):
        (block,) = cache(pool, b"%d" % number)
        pool.free_blocks([block])
        most = max(most, len(tracker._changed))
    assert NUM_BLOCKS < most <= 2 * NUM_BLOCKS + 1
    # The worst case: the bound is checked only at an eviction, and the cache is empty.
    for number in range(50):
        pool.evict_blocks(set(range(1, NUM_BLOCKS)))
        keys = (b"%d %d" % (number, n) for n in range(NUM_BLOCKS - 1))
        pool.free_blocks(cache(pool, *keys))
        most = max(most, len(tracker._changed))
    assert 2 * NUM_BLOCKS < most < 3 * NUM_BLOCKS
    assert reader.read() == first_blocks(pool) != {}
