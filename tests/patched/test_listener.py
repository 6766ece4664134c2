# SPDX-License-Identifier: Apache-2.0
"""Listeners of vLLM's real block pool know exactly what it holds.

With a block of the patch left out, one of the tests fails.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import vllm
from listener_lab import (
    HASHER,
    QUICK,
    THOROUGH,
    Replica,
    Variant,
    cache,
    check_explored,
    first_blocks,
    pairs_held,
    run_machine,
)
from variants import block_ids, patch, patched_source
from vllm import SamplingParams
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
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


def make_key(block_hash: bytes) -> bytes:
    return make_block_hash_with_group_id(block_hash, 0)


@pytest.fixture
def variant() -> Variant:
    return Variant()


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


def test_a_tracker_that_is_never_taken_holds_three_pools_of_keys_at_most(variant):
    pool = variant.pool(CASE_BLOCKS)
    tracker = variant.tracker(pool)
    pool.free_blocks(cache(pool, b"known"))
    tracker.take().apply_to(block_ids := {})
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
    tracker.take().apply_to(block_ids)
    assert block_ids == first_blocks(pool) != {}


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
    # The call that raised, and that which detached it.
    assert raising.calls == 2
    blocks += cache(pool, b"f")
    assert {b.block_id for b in pool.blocks if b.block_hash} == {
        block_id for _, block_id in pairs_held(pool)
    }
    assert all(other.pairs == pairs_held(pool) for other in others)


class Failing(set):
    """Keys of a tracker that cannot be added to or cleared."""

    def add(self, key: bytes) -> None:
        raise MemoryError

    clear = add


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_tracker_that_raises_withdraws_everything_and_reports_nothing_again(moment):
    pool = Variant().pool(CASE_BLOCKS)
    tracker = Variant.tracker(pool)
    blocks = cache(pool, b"a", b"a", b"b")
    tracker.take().apply_to(block_ids := {})
    assert block_ids == first_blocks(pool) != {}
    tracker._changed = Failing()
    if moment == "cached":
        cache(pool, b"c")
    elif moment == "reset":
        tracker.on_cache_reset = lambda: tracker._changed.clear(b"")
        pool.free_blocks(blocks)
        assert pool.reset_prefix_cache()
    else:
        pool.evict_blocks({blocks[0 if moment == "one of two" else 2].block_id})
    assert tracker.is_detached
    cache(pool, b"d")
    tracker.take().apply_to(block_ids)
    assert block_ids == {}
    cache(pool, b"e")
    assert tracker.take() is None


def test_a_listener_that_raises_is_called_to_withdraw_and_no_more(variant):
    pool = variant.pool(CASE_BLOCKS)
    heard = []

    class Mirror(Replica):
        def on_block_cached(self, key: bytes, block_id: int) -> None:
            super().on_block_cached(key, block_id)
            heard.append(key)
            if key == make_key(b"b"):
                raise MemoryError

    pool.add_listener(mirror := Mirror())
    cache(pool, b"a", b"b", b"c")
    assert heard == [make_key(b"a"), make_key(b"b")]
    assert mirror.pairs == set()
    assert mirror.heard[-1] == ("reset",)


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


def is_noticed(pool: str) -> bool:
    try:
        variant = Variant(pool)
        for case in CASES:
            case(variant)
        for moment in MOMENTS:
            check_dropped(variant, moment)
        run_machine(variant, QUICK)
    except Exception:  # however it shows
        return True
    return False


def test_each_block_of_the_patch_is_needed():
    lines, blocks = parse(inspect.getsource(block_pool).encode())
    needed = block_ids(PATCH, Path(vllm.__file__).parent, FILE)
    for block in needed:
        left = [each for each in blocks if each.name != f"{PATCH}:{block}"]
        assert len(left) == len(blocks) - 1
        assert is_noticed(render(lines, left).decode()), block
    assert len(needed) > 8
