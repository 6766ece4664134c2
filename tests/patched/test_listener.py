# SPDX-License-Identifier: Apache-2.0
"""Listeners of vLLM's real block pool know exactly what it holds.

With a block of the patch left out, or another thing wrong, one of the tests fails.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from listener_lab import (
    BLOCK_SIZE,
    HASHER,
    QUICK,
    THOROUGH,
    Replica,
    Variant,
    check_explored,
    first_blocks,
    pairs_held,
    run_machine,
)
from variants import block_ids, patch, patched_source
from vllm import SamplingParams
from vllm.v1.core import block_pool, block_pool_listener
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvtax.patcher.blocks import parse, render
from tests.releases import INSTALLED, package_of

PATCH = "block_pool_delta_listener"
PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
FILE = "v1/core/block_pool.py"
# The release whose pool, which masks blocks, still runs in 0.18.1's manager.
LATER = "0.22.1"
CASE_BLOCKS = 8
# What a listener that raises is told then.
MOMENTS = ["cached", "evicted", "one of two", "reset"]


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


@pytest.fixture
def variant() -> Variant:
    return Variant()


def test_each_block_is_told_once_when_cached_and_once_when_evicted(variant):
    pool = variant.pool(CASE_BLOCKS)
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


def test_all_subscribers_hear_the_same_in_the_same_order(variant):
    pool = variant.pool(CASE_BLOCKS)
    replicas = [variant.listen(pool) for _ in range(3)]
    for _ in range(3):
        pool.free_blocks(cache(pool, b"a", b"b", b"a", b"c"))
    assert pool.reset_prefix_cache()
    pool.free_blocks(cache(pool, b"d"))
    assert len(replicas[0].heard) > 15
    assert replicas[0].heard == replicas[1].heard == replicas[2].heard


def test_a_late_listener_first_receives_everything_already_cached(variant):
    pool = variant.pool(CASE_BLOCKS)
    blocks = cache(pool, b"a", b"b", b"a", b"a")
    pool.evict_blocks({blocks[1].block_id})
    replica = variant.listen(pool)
    assert {call[0] for call in replica.heard} == {"cached"}
    assert len(replica.heard) == 3
    assert replica.pairs == pairs_held(pool)
    assert Reader(variant.tracker(pool)).block_ids == first_blocks(pool) != {}


def test_listeners_of_one_pool_hear_nothing_of_another(variant):
    pools = [variant.pool(CASE_BLOCKS) for _ in range(2)]
    replicas = [variant.listen(pool) for pool in pools]
    trackers = [variant.tracker(pool) for pool in pools]
    pools[0].free_blocks(cache(pools[0], b"a", b"a"))
    assert pools[0].reset_prefix_cache()
    assert replicas[1].heard == []
    assert trackers[1].take() is None
    cache(pools[1], b"b")
    assert [call[0] for call in replicas[0].heard] == ["cached", "cached", "reset"]
    assert replicas[1].pairs == pairs_held(pools[1])


def test_without_prefix_caching_no_block_is_told(variant):
    manager = variant.manager(CASE_BLOCKS, caching=False)
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


def test_a_reset_is_told_and_subscribers_outlive_it(variant):
    pool = variant.pool(CASE_BLOCKS)
    replica, reader = variant.listen(pool), Reader(variant.tracker(pool))
    for key in (b"a", b"b", b"c"):
        pool.free_blocks(cache(pool, key, key))
        assert replica.pairs == pairs_held(pool)
        assert reader.read() == first_blocks(pool) != {}
        assert pool.reset_prefix_cache()
        assert replica.heard[-1] == ("reset",)
        assert replica.pairs == set()
        assert reader.read() == {}


def test_a_refused_reset_is_not_told(variant):
    pool = variant.pool(CASE_BLOCKS)
    replica, reader = variant.listen(pool), Reader(variant.tracker(pool))
    cache(pool, b"a")
    assert not pool.reset_prefix_cache()
    assert [call[0] for call in replica.heard] == ["cached"]
    assert reader.read() == first_blocks(pool) != {}


def test_nothing_changed_is_none_and_a_change_is_taken_once(variant):
    pool = variant.pool(CASE_BLOCKS)
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


def test_what_comes_and_goes_between_takes_is_not_shipped_as_cached(variant):
    pool = variant.pool(CASE_BLOCKS)
    tracker = variant.tracker(pool)
    (block,) = cache(pool, b"a")
    key = block.block_hash
    pool.evict_blocks({block.block_id})
    changes = tracker.take()
    assert (changes.cleared, changes.cached, changes.evicted) == (False, {}, [key])
    changes.apply_to({})  # a map that never had the key stays as it is


def test_a_key_cached_again_in_another_block_is_what_only_the_walk_misses(variant):
    for forget in ("evict", "reset"):
        pool = variant.pool(CASE_BLOCKS)
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


def test_of_two_blocks_with_a_key_an_evicted_one_is_what_only_the_walk_misses(variant):
    pool = variant.pool(CASE_BLOCKS)
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


def test_a_tracker_that_is_never_taken_holds_three_pools_of_keys_at_most(variant):
    pool = variant.pool(CASE_BLOCKS)
    tracker = variant.tracker(pool)
    reader = Reader(tracker)
    pool.free_blocks(cache(pool, b"known"))
    reader.read()
    most = 0
    for number in range(50 * CASE_BLOCKS):
        (block,) = cache(pool, b"%d" % number)
        pool.free_blocks([block])
        most = max(most, len(tracker._changed))
    assert CASE_BLOCKS < most <= 2 * CASE_BLOCKS + 1
    # The worst case: the bound is checked only at an eviction, and the cache is empty.
    for number in range(50):
        pool.evict_blocks(set(range(1, CASE_BLOCKS)))
        keys = (b"%d %d" % (number, n) for n in range(CASE_BLOCKS - 1))
        pool.free_blocks(cache(pool, *keys))
        most = max(most, len(tracker._changed))
    assert 2 * CASE_BLOCKS < most < 3 * CASE_BLOCKS
    assert reader.read() == first_blocks(pool) != {}


def test_a_listener_that_is_removed_hears_nothing_more_and_the_others_do(variant):
    pool = variant.pool(CASE_BLOCKS)
    gone, left = variant.listen(pool), variant.listen(pool)
    pool.free_blocks(cache(pool, b"a"))
    pool.remove_listener(gone)
    pool.remove_listener(gone)
    pool.free_blocks(cache(pool, b"b"))
    assert pool.reset_prefix_cache()
    assert [call[0] for call in gone.heard] == ["cached"]
    assert [call[0] for call in left.heard] == ["cached", "cached", "reset"]


def test_listeners_that_change_places_in_a_call_hear_each_change_once(variant):
    pool = variant.pool(CASE_BLOCKS)
    pool.free_blocks(cache(pool, b"a"))
    late = Replica()

    class Exchanging(Replica):
        def on_block_evicted(self, key: bytes, block_id: int) -> None:
            super().on_block_evicted(key, block_id)
            pool.remove_listener(gone)
            pool.add_listener(late)

    pool.add_listener(Exchanging())
    gone = variant.listen(pool)
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash})
    cache(pool, b"b")
    assert [call[0] for call in gone.heard] == ["cached", "evicted"]
    assert [call[0] for call in late.heard] == ["cached"]
    assert late.pairs == pairs_held(pool)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_listener_that_raises_is_dropped_and_the_pool_is_whole(moment):
    check_dropped(Variant(), moment)


def check_dropped(variant: Variant, moment: str) -> None:
    """The change is done, and heard by the others; what follows, too."""
    pool = variant.pool(CASE_BLOCKS)
    blocks = cache(pool, b"a", b"a", b"b")
    raising = Raising()
    others = [variant.listen(pool)]
    pool.add_listener(raising)
    others.append(variant.listen(pool))
    raising.raises = True
    if moment == "cached":
        blocks += cache(pool, b"c", b"d")
    elif moment == "reset":
        pool.free_blocks(blocks)
        assert pool.reset_prefix_cache()
        assert not any(block.block_hash for block in pool.blocks)
        blocks = cache(pool, b"e")
    else:
        pool.evict_blocks({blocks[0 if moment == "one of two" else 2].block_id})
    assert raising.calls == 1
    blocks += cache(pool, b"f")
    assert {b.block_id for b in pool.blocks if b.block_hash} == {
        block_id for _, block_id in pairs_held(pool)
    }
    assert all(other.pairs == pairs_held(pool) for other in others)


def test_a_late_listener_that_raises_is_not_added(variant):
    pool = variant.pool(CASE_BLOCKS)
    cache(pool, b"a")
    raising = Raising()
    raising.raises = True
    with pytest.raises(ZeroDivisionError):
        pool.add_listener(raising)
    cache(pool, b"b")
    assert raising.calls == 1


def test_a_reset_is_told_when_no_block_has_a_hash_any_more(variant):
    pool = variant.pool(CASE_BLOCKS)
    hashes = []

    class Late(Replica):
        def on_cache_reset(self) -> None:
            hashes.extend(block.block_hash for block in pool.blocks)

    pool.add_listener(Late())
    pool.free_blocks(cache(pool, b"a", b"b"))
    assert pool.reset_prefix_cache()
    assert hashes == [None] * CASE_BLOCKS


class Raising(Replica):
    """A listener that raises at each call from some time on."""

    raises = False
    calls = 0

    def __getattribute__(self, name: str):
        if name.startswith("on_") and self.raises:
            self.calls += 1
            raise ZeroDivisionError
        return super().__getattribute__(name)


CASES = [
    function
    for name, function in list(globals().items())
    if name.startswith("test_")
    and "moment" not in inspect.signature(function).parameters
]


def test_replicas_and_trackers_equal_the_pool_after_any_operations(variant):
    check_explored(run_machine(variant, THOROUGH))


def test_the_block_pool_of_a_later_release_is_heard_as_well(tmp_path):
    if INSTALLED != "0.18.1":
        pytest.skip(f"the pool of {LATER} is tested in 0.18.1's manager")
    patched = patched_source(package_of(LATER), FILE, [patch(PATCH)], tmp_path)
    variant = Variant(pool=patched.read_text())
    for case in CASES:
        case(variant)
    check_explored(run_machine(variant, THOROUGH))


BLOCKS = [
    "import",
    "map_init",
    "map_insert",
    "map_pop_single",
    "map_pop_duplicate",
    "map_views",
    "pool_add_listener",
    "reset_begin",
    "reset_end",
    "reset_called",
]
# The file, what stands there, and what is put in its place.
REPLACED = {
    "snapshot left out": (
        "pool",
        "for key, blocks in self._cache.items():",
        "for key, blocks in {}.items():",
    ),
    "snapshot of one of several blocks with a key": (
        "pool",
        "for block_id in blocks:\n",
        "for block_id in [*blocks][:1]:\n",
    ),
    "snapshot told, but nothing after": (
        "pool",
        "    self.listeners += (listener,)",
        "    pass",
    ),
    "only one listener": (
        "pool",
        "    self.listeners += (listener,)",
        "    self.listeners = (listener,)",
    ),
    "one list of listeners for all pools": (
        "pool",
        "    self.listeners += (listener,)",
        "    type(self).listeners = (*getattr(type(self), 'listeners', ()), listener)\n"
        "        vars(self).pop('listeners', None)",
    ),
    "reset loses the listeners": (
        "pool",
        "self.cached_block_hash_to_block.listeners = listeners",
        "pass",
    ),
    "reset not told": (
        "pool",
        "        listener.on_cache_reset()",
        "        pass",
    ),
    "an eviction told that was none": (
        "pool",
        "            if block is not None:\n",
        "            if True:\n",
    ),
    "a listener that raises is kept": (
        "pool",
        "\n        self.remove_listener(listener)\n",
        "\n",
    ),
    "all listeners removed": (
        "pool",
        "if other is not listener",
        "if False",
    ),
    "cached not noted": (
        "listener",
        "block_id: int) -> None:\n        self._changed.add(key)\n\n",
        "block_id: int) -> None:\n        pass\n\n",
    ),
    "evicted not noted": (
        "listener",
        "block_id: int) -> None:\n        self._changed.add(key)\n        #",
        "block_id: int) -> None:\n        #",
    ),
    "no bound": (
        "listener",
        "if len(self._changed) > self._max_changed:",
        "if False:",
    ),
    "overflow drops the changes": (
        "listener",
        "            self.on_cache_reset()",
        "            self._changed.clear()",
    ),
    "reset not noted": (
        "listener",
        "        self._cleared = True",
        "        pass",
    ),
    "reset keeps what was noted before": (
        "listener",
        "        self._changed.clear()\n        self._cleared = True",
        "        self._cleared = True",
    ),
    "changes taken again": (
        "listener",
        "        self._changed.clear()\n        self._cleared = False",
        "        self._cleared = False",
    ),
    "reset taken again": (
        "listener",
        "        self._cleared = False\n        return",
        "        return",
    ),
    "the copy after a reset left out": (
        "listener",
        "for key in block_map.keys() if self._cleared else self._changed:",
        "for key in self._changed:",
    ),
    "all of the cache shipped each time": (
        "listener",
        "for key in block_map.keys() if self._cleared else self._changed:",
        "for key in {**block_map._cache, **dict.fromkeys(self._changed)}:",
    ),
    "never nothing to tell": (
        "listener",
        "if not (self._changed or self._cleared):",
        "if False:",
    ),
    "old keys kept at a reset": (
        "listener",
        "            block_ids.clear()",
        "            pass",
    ),
    "evicted keys kept": (
        "listener",
        "            block_ids.pop(key, None)",
        "            pass",
    ),
    "moved keys kept": (
        "listener",
        "        block_ids.update(self.cached)",
        "        block_ids |= self.cached | block_ids",
    ),
}
FILES = {"pool": block_pool, "listener": block_pool_listener}


def text_of(file: str) -> str:
    return inspect.getsource(FILES[file])


def check_noticed(**texts: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 (however it shows)
        variant = Variant(**texts)
        for case in CASES:
            case(variant)
        for moment in MOMENTS:
            check_dropped(variant, moment)
        run_machine(variant, QUICK)


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_of_the_patch_is_needed(block):
    lines, blocks = parse(text_of("pool").encode())
    left = [each for each in blocks if each.name != f"{PATCH}:{block}"]
    assert len(left) == len(blocks) - 1
    check_noticed(pool=render(lines, left).decode())


def test_no_block_of_the_patch_has_been_left_out_of_these_tests():
    assert set(BLOCKS) == set(block_ids(PATCH, Path(vllm.__file__).parent, FILE))


@pytest.mark.parametrize("edit", REPLACED)
def test_one_thing_wrong_is_noticed(edit):
    file, old, new = REPLACED[edit]
    text = text_of(file)
    assert text.count(old) == 1, f"{text.count(old)} times in the file: {old!r}"
    check_noticed(**{file: text.replace(old, new)})
