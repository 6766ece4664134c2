# SPDX-License-Identifier: Apache-2.0
"""Direct read offers only blocks that are written, and only while they stay so."""

from __future__ import annotations

from ledger_lab import (
    NUM_BLOCKS,
    a_step,
    block_ids_offered,
    cache,
    changed,
    ids,
    new_pool,
    written,
)
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

PATCHES = ["block_pool_delta_listener"]
ONLY = "0.18.1"


# In flight.


def test_a_block_is_offered_when_its_step_has_ended_and_not_before(ledger_module):
    pool = new_pool()
    ledger = ledger_module.BlockLedger(pool)
    a_step(ledger)
    blocks = cache(pool, b"a", b"b")
    for event in (lambda: None, ledger.begin_step):
        event()
        offer = ledger.lookup([b"a", b"b"])
        assert (offer.token, offer.block_ids, offer.stopped) == (0, [], "in_flight")
    ledger.finish_step()
    offer = ledger.lookup([b"a", b"b"])
    assert (offer.block_ids, offer.stopped) == (ids(*blocks), "")
    assert ledger.validate(offer.token) == 2


def test_of_two_steps_in_flight_the_older_one_ends_first(ledger_module):
    pool = new_pool()
    ledger = ledger_module.BlockLedger(pool)
    (first,) = cache(pool, b"a")
    ledger.begin_step()
    (second,) = cache(pool, b"b")
    ledger.begin_step()
    (third,) = cache(pool, b"c")
    assert ledger.lookup([b"a", b"b", b"c"]).stopped == "in_flight"
    ledger.finish_step()
    offer = ledger.lookup([b"a", b"b", b"c"])
    assert (offer.block_ids, offer.stopped) == (ids(first), "in_flight")
    ledger.begin_step()
    ledger.finish_step()
    assert block_ids_offered(ledger, b"a", b"b", b"c") == ids(first, second)
    ledger.finish_step()
    assert block_ids_offered(ledger, b"a", b"b", b"c") == ids(first, second, third)


def test_a_block_cached_after_its_step_is_offered_a_step_later(ledger_module):
    """As async scheduling does; which step it was cannot be told."""
    pool = new_pool()
    ledger = ledger_module.BlockLedger(pool)
    ledger.begin_step()
    (block,) = cache(pool, b"a")
    ledger.finish_step()
    assert ledger.lookup([b"a"]).stopped == "in_flight"
    a_step(ledger)
    assert block_ids_offered(ledger, b"a") == ids(block)


def test_a_block_is_not_offered_before_the_listener_has_heard_of_it(ledger_module):
    pool, ledger, (block,) = written(ledger_module, b"a")
    pool.evict_blocks({block.block_id})
    block_map = pool.cached_block_hash_to_block
    with changed(block_map, "listeners", []):
        pool.free_blocks([block])
        while cache(pool, b"a") != [block]:
            pool.evict_blocks(set(range(1, NUM_BLOCKS)) - {block.block_id})
    assert block_map.get_one_block(block.block_hash) is block
    assert ledger.lookup([b"a"]).stopped == "absent"


def test_a_step_that_ends_but_never_began_ends_all_offers(ledger_module):
    pool, ledger, _ = written(ledger_module, b"a")
    offer = ledger.lookup([b"a"])
    ledger.finish_step()
    for _ in range(3):
        assert block_ids_offered(ledger, b"a") == []
        cache(pool, b"b")
        a_step(ledger)
        assert block_ids_offered(ledger, b"b") == []
    assert ledger.validate(offer.token) == 1


# Evicted.


def test_only_leading_blocks_that_are_still_cached_are_valid(ledger_module):
    for evicted, valid in ((0, 0), (1, 1), (2, 2), (3, 3)):
        pool, ledger, blocks = written(ledger_module, b"a", b"b", b"c")
        offer = ledger.lookup([b"a", b"b", b"c"])
        pool.evict_blocks({*ids(*blocks[evicted : evicted + 1])})
        assert ledger.validate(offer.token) == valid
        a_step(ledger)
        expected = [b"a", b"b", b"c"][:evicted]
        offer = ledger.lookup([b"a", b"b", b"c"])
        assert offer.block_ids == ids(*blocks[: len(expected)])
        assert offer.stopped == ("absent" if valid < 3 else "")


def test_a_block_evicted_and_cached_again_is_not_what_was_offered(
    ledger_module,
):
    """A-B-A: the same hash, in the same block, but other bytes in between."""
    pool, ledger, (block,) = written(ledger_module, b"a", num_blocks=2)
    first = ledger.lookup([b"a"])
    for block_hash in (b"b", b"a"):
        pool.free_blocks([block])
        assert cache(pool, block_hash) == [block]
    assert block.block_hash == make_block_hash_with_group_id(b"a", 0)
    assert ledger.lookup([b"a"]).stopped == "in_flight"
    a_step(ledger)
    second = ledger.lookup([b"a"])
    assert second.block_ids == first.block_ids
    assert ledger.validate(first.token) == 0
    assert ledger.validate(second.token) == 1


def test_a_block_that_changed_hands_since_it_was_found_is_not_offered(ledger_module):
    """The lookup stood still for a whole step of the engine, right in the middle."""
    pool, ledger, (block,) = written(ledger_module, b"a", num_blocks=2)
    block_map = pool.cached_block_hash_to_block

    class Slow:
        @staticmethod
        def get_one_block(key: bytes) -> KVCacheBlock | None:
            found = block_map.get_one_block(key)
            pool.free_blocks([block])
            assert cache(pool, b"b") == [block]
            a_step(ledger)
            return found

    with changed(pool, "cached_block_hash_to_block", Slow):
        # The pool itself goes on with its own map.
        Slow.insert, Slow.pop = block_map.insert, block_map.pop
        assert ledger.lookup([b"a"]).stopped == "absent"
    assert block_ids_offered(ledger, b"b") == ids(block)


def test_a_block_about_to_change_hands_is_not_offered(ledger_module):
    pool, ledger, (block,) = written(ledger_module, b"a")
    key = block.block_hash
    block.reset_hash()
    assert pool.cached_block_hash_to_block.get_one_block(key) is block
    assert ledger.lookup([b"a"]).stopped == "absent"


def test_an_evicted_block_that_is_still_in_use_is_not_offered(ledger_module):
    pool, ledger, (block,) = written(ledger_module, b"a")
    pool.evict_blocks({block.block_id})
    assert block.ref_cnt == 1
    assert ledger.lookup([b"a"]).stopped == "absent"


def test_a_map_that_changes_under_a_lookup_ends_its_run(ledger_module):
    pool, ledger, (block,) = written(ledger_module, b"a")
    block_map = pool.cached_block_hash_to_block
    for error in (RuntimeError("changed size during iteration"), StopIteration()):

        class Changing:
            @staticmethod
            def get_one_block(key: bytes, error=error) -> KVCacheBlock | None:
                if key == make_block_hash_with_group_id(b"b", 0):
                    raise error
                return block_map.get_one_block(key)

        with changed(pool, "cached_block_hash_to_block", Changing):
            offer = ledger.lookup([b"a", b"b", b"a"])
        assert (offer.block_ids, offer.stopped) == (ids(block), "absent")


# Reset.


def test_nothing_is_valid_after_a_reset_and_the_ledger_goes_on(ledger_module):
    pool, ledger, blocks = written(ledger_module, b"a", b"b")
    offer = ledger.lookup([b"a", b"b"])
    pool.free_blocks(blocks)
    old_map = pool.cached_block_hash_to_block
    assert pool.reset_prefix_cache()
    assert ledger.validate(offer.token) == 0
    assert ledger.lookup([b"a", b"b"]).stopped == "absent"
    # Who had hold of the map before it was swapped finds blocks in it.
    with changed(pool, "cached_block_hash_to_block", old_map):
        assert ledger.lookup([b"a", b"b"]).stopped == "absent"
    again = cache(pool, b"a", b"b")
    assert ledger.lookup([b"a", b"b"]).stopped == "in_flight"
    a_step(ledger)
    assert block_ids_offered(ledger, b"a", b"b") == ids(*again)


def test_a_refused_reset_changes_nothing(ledger_module):
    pool, ledger, blocks = written(ledger_module, b"a")
    offer = ledger.lookup([b"a"])
    assert not pool.reset_prefix_cache()
    assert ledger.validate(offer.token) == 1
    assert block_ids_offered(ledger, b"a") == ids(*blocks)


# Several blocks with one hash.


def test_of_blocks_with_one_hash_the_offered_one_counts(ledger_module):
    pool, ledger, (first,) = written(ledger_module, b"a")
    (second,) = cache(pool, b"a")
    offer = ledger.lookup([b"a"])
    assert offer.block_ids == ids(first)
    pool.evict_blocks({second.block_id})
    assert ledger.validate(offer.token) == 1

    (third,) = cache(pool, b"a")
    offer = ledger.lookup([b"a"])
    pool.evict_blocks({first.block_id})
    assert ledger.validate(offer.token) == 0
    assert ledger.lookup([b"a"]).stopped == "in_flight"
    a_step(ledger)
    assert block_ids_offered(ledger, b"a") == ids(third)


def test_what_was_cached_before_the_ledger_is_offered_after_a_step(ledger_module):
    """Also where the map's key is another object than the block's hash."""
    pool = new_pool()
    first, second, third = cache(pool, b"a", b"b", b"a")
    pool.evict_blocks({first.block_id})
    (key,) = (key for key in pool.cached_block_hash_to_block._cache if key[:1] == b"a")
    assert key is not third.block_hash
    ledger = ledger_module.BlockLedger(pool)
    assert ledger.lookup([b"a", b"b"]).stopped == "in_flight"
    a_step(ledger)
    offer = ledger.lookup([b"a", b"b"])
    assert offer.block_ids == ids(third, second)
    assert ledger.validate(offer.token) == 2
