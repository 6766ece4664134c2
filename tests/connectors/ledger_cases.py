# SPDX-License-Identifier: Apache-2.0
"""What a BlockLedger offers and finds valid, on vLLM's real block pool.

Each case takes the ledger's module, which may have one thing wrong, and asserts;
ledger_script.py runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

BLOCK_SIZE = 16
NUM_BLOCKS = 8


def new_pool(num_blocks: int = NUM_BLOCKS) -> BlockPool:
    return BlockPool(num_blocks, True, BLOCK_SIZE)


def cache(pool: BlockPool, *hashes: bytes) -> list[KVCacheBlock]:
    """New blocks of the pool, in use, one cached under each hash."""
    blocks = pool.get_new_blocks(len(hashes))
    request = SimpleNamespace(block_hashes=list(hashes))
    pool.cache_full_blocks(request, blocks, 0, len(hashes), BLOCK_SIZE, 0)
    return blocks


def ids(*blocks: KVCacheBlock) -> list[int]:
    return [block.block_id for block in blocks]


def a_step(ledger) -> None:
    ledger.begin_step()
    ledger.finish_step()


def written(module: ModuleType, *hashes: bytes, num_blocks: int = NUM_BLOCKS):
    """A pool, its ledger, and blocks cached in a step that has ended."""
    pool = new_pool(num_blocks)
    ledger = module.BlockLedger(pool)
    blocks = cache(pool, *hashes)
    a_step(ledger)
    return pool, ledger, blocks


def block_ids_offered(ledger, *hashes: bytes) -> list[int]:
    return ledger.lookup(list(hashes)).block_ids


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


# In flight.


def a_block_is_offered_when_its_step_has_ended_and_not_before(module):
    pool = new_pool()
    ledger = module.BlockLedger(pool)
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


def of_two_steps_in_flight_the_older_one_ends_first(module):
    pool = new_pool()
    ledger = module.BlockLedger(pool)
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


def a_block_cached_after_its_step_is_offered_a_step_later(module):
    """As async scheduling does; which step it was cannot be told."""
    pool = new_pool()
    ledger = module.BlockLedger(pool)
    ledger.begin_step()
    (block,) = cache(pool, b"a")
    ledger.finish_step()
    assert ledger.lookup([b"a"]).stopped == "in_flight"
    a_step(ledger)
    assert block_ids_offered(ledger, b"a") == ids(block)


def a_block_is_not_offered_before_the_listener_has_heard_of_it(module):
    pool, ledger, (block,) = written(module, b"a")
    pool.evict_blocks({block.block_id})
    block_map = pool.cached_block_hash_to_block
    with changed(block_map, "listeners", []):
        pool.free_blocks([block])
        while cache(pool, b"a") != [block]:
            pool.evict_blocks(set(range(1, NUM_BLOCKS)) - {block.block_id})
    assert block_map.get_one_block(block.block_hash) is block
    assert ledger.lookup([b"a"]).stopped == "absent"


def a_step_that_ends_but_never_began_ends_all_offers(module):
    pool, ledger, _ = written(module, b"a")
    offer = ledger.lookup([b"a"])
    ledger.finish_step()
    for _ in range(3):
        assert block_ids_offered(ledger, b"a") == []
        cache(pool, b"b")
        a_step(ledger)
        assert block_ids_offered(ledger, b"b") == []
    assert ledger.validate(offer.token) == 1


# Evicted.


def only_leading_blocks_that_are_still_cached_are_valid(module):
    for evicted, valid in ((0, 0), (1, 1), (2, 2), (3, 3)):
        pool, ledger, blocks = written(module, b"a", b"b", b"c")
        offer = ledger.lookup([b"a", b"b", b"c"])
        pool.evict_blocks({*ids(*blocks[evicted : evicted + 1])})
        assert ledger.validate(offer.token) == valid
        a_step(ledger)
        expected = [b"a", b"b", b"c"][:evicted]
        offer = ledger.lookup([b"a", b"b", b"c"])
        assert offer.block_ids == ids(*blocks[: len(expected)])
        assert offer.stopped == ("absent" if valid < 3 else "")


def a_block_that_was_evicted_and_cached_again_is_not_what_was_offered(module):
    """A-B-A: the same hash, in the same block, but other bytes in between."""
    pool, ledger, (block,) = written(module, b"a", num_blocks=2)
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


def a_block_that_changed_hands_since_it_was_found_is_not_offered(module):
    """The lookup stood still for a whole step of the engine, right in the middle."""
    pool, ledger, (block,) = written(module, b"a", num_blocks=2)
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


def a_block_about_to_change_hands_is_not_offered(module):
    pool, ledger, (block,) = written(module, b"a")
    key = block.block_hash
    block.reset_hash()
    assert pool.cached_block_hash_to_block.get_one_block(key) is block
    assert ledger.lookup([b"a"]).stopped == "absent"


def an_evicted_block_that_is_still_in_use_is_not_offered(module):
    pool, ledger, (block,) = written(module, b"a")
    pool.evict_blocks({block.block_id})
    assert block.ref_cnt == 1
    assert ledger.lookup([b"a"]).stopped == "absent"


def a_map_that_changes_under_a_lookup_ends_its_run(module):
    pool, ledger, (block,) = written(module, b"a")
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


def nothing_is_valid_after_a_reset_and_the_ledger_goes_on(module):
    pool, ledger, blocks = written(module, b"a", b"b")
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


def a_refused_reset_changes_nothing(module):
    pool, ledger, blocks = written(module, b"a")
    offer = ledger.lookup([b"a"])
    assert not pool.reset_prefix_cache()
    assert ledger.validate(offer.token) == 1
    assert block_ids_offered(ledger, b"a") == ids(*blocks)


# Several blocks with one hash.


def of_blocks_with_one_hash_the_offered_one_counts(module):
    pool, ledger, (first,) = written(module, b"a")
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


def what_was_cached_before_the_ledger_is_offered_after_a_step(module):
    """Also where the map's key is another object than the block's hash."""
    pool = new_pool()
    first, second, third = cache(pool, b"a", b"b", b"a")
    pool.evict_blocks({first.block_id})
    (key,) = (key for key in pool.cached_block_hash_to_block._cache if key[:1] == b"a")
    assert key is not third.block_hash
    ledger = module.BlockLedger(pool)
    assert ledger.lookup([b"a", b"b"]).stopped == "in_flight"
    a_step(ledger)
    offer = ledger.lookup([b"a", b"b"])
    assert offer.block_ids == ids(third, second)
    assert ledger.validate(offer.token) == 2


# Offers.


def an_offer_is_validated_once_by_each_reader(module):
    pool = new_pool()
    for readers in (1, 3):
        ledger = module.BlockLedger(pool, readers)
        (block,) = cache(pool, b"%d" % readers)
        a_step(ledger)
        token = ledger.lookup([b"%d" % readers]).token
        answers = [ledger.validate(token) for _ in range(5)]
        assert answers == [1] * readers + [0] * (5 - readers)
        assert not ledger._held
        assert ledger._num_held_blocks == 0
        # Each at its own time.
        token = ledger.lookup([b"%d" % readers]).token
        if readers > 1:
            assert ledger.validate(token) == 1
        pool.evict_blocks({block.block_id})
        assert ledger.validate(token) == 0


def no_token_is_that_of_another_ledger_or_of_nothing(module):
    """As after a restart: the reader asks the new process about the old one's offer."""
    pool = new_pool()
    ledgers = [module.BlockLedger(pool) for _ in range(2)]
    cache(pool, b"a")
    for ledger in ledgers:
        a_step(ledger)
    tokens = [ledger.lookup([b"a"]).token for ledger in ledgers for _ in range(20)]
    assert len(set(tokens)) == 40
    assert all(0 < token < 1 << 63 for token in tokens)
    assert not any(ledgers[1].validate(token) for token in tokens[:20])
    assert ledgers[1].validate(0) == 0
    assert all(ledgers[1].validate(token) == 1 for token in tokens[20:])


def an_offer_is_worth_nothing_after_its_deadline(module):
    _, ledger, _ = written(module, b"a")
    now_s = [1_000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    with changed(module, "time", clock):
        early, late = ledger.lookup([b"a"]), ledger.lookup([b"a"])
        now_s[0] += module.TOKEN_LIFETIME_S - 0.1
        assert ledger.validate(early.token) == 1
        kept = ledger.lookup([b"a"])
        now_s[0] += 0.2
        assert ledger.validate(late.token) == 0
        assert ledger.counters.tokens_expired == 1
        assert ledger.validate(kept.token) == 1
        # Nobody validates, and yet they go.
        ledger.lookup([b"a"])
        now_s[0] += module.TOKEN_LIFETIME_S + 0.1
        ledger.lookup([b"a"])
        assert len(ledger._held) == 1


def offers_nobody_validates_are_bounded_and_the_newest_stay(module):
    _, ledger, _ = written(module, b"a", b"b", b"c")
    with changed(module, "MAX_TOKENS", 10):
        tokens = [ledger.lookup([b"a"]).token for _ in range(100)]
        assert len(ledger._held) == 10
        assert [ledger.validate(token) for token in tokens] == [0] * 90 + [1] * 10
    with changed(module, "MAX_HELD_BLOCKS", 30):
        tokens = [ledger.lookup([b"a", b"b", b"c"]).token for _ in range(100)]
        assert ledger._num_held_blocks == 30
        assert [ledger.validate(token) for token in tokens] == [0] * 90 + [3] * 10
    assert ledger._num_held_blocks == 0
    assert not ledger._held


def a_lookup_of_too_many_hashes_is_answered_for_the_first(module):
    _, ledger, _ = written(module, b"a")
    offer = ledger.lookup([b"a"] * (module.MAX_HASHES + 5))
    assert len(offer.block_ids) == module.MAX_HASHES


def what_happened_is_counted(module):
    pool, ledger, blocks = written(module, b"a", b"b")
    offer = ledger.lookup([b"a", b"b", b"c"])
    pool.evict_blocks({blocks[1].block_id})
    ledger.validate(offer.token)
    ledger.validate(offer.token)
    cache(pool, b"c")
    ledger.lookup([b"c"])
    ledger.lookup([b"a"])
    assert vars(ledger.counters) == {
        "lookups": 3,
        "stopped_absent": 1,
        "stopped_in_flight": 1,
        "blocks_offered": 3,
        "blocks_valid": 1,
        "blocks_evicted": 1,
        "tokens_expired": 0,
        "tokens_unknown": 1,
    }


CASES = [
    a_block_is_offered_when_its_step_has_ended_and_not_before,
    of_two_steps_in_flight_the_older_one_ends_first,
    a_block_cached_after_its_step_is_offered_a_step_later,
    a_block_is_not_offered_before_the_listener_has_heard_of_it,
    a_step_that_ends_but_never_began_ends_all_offers,
    only_leading_blocks_that_are_still_cached_are_valid,
    a_block_that_was_evicted_and_cached_again_is_not_what_was_offered,
    a_block_that_changed_hands_since_it_was_found_is_not_offered,
    a_block_about_to_change_hands_is_not_offered,
    an_evicted_block_that_is_still_in_use_is_not_offered,
    a_map_that_changes_under_a_lookup_ends_its_run,
    nothing_is_valid_after_a_reset_and_the_ledger_goes_on,
    a_refused_reset_changes_nothing,
    of_blocks_with_one_hash_the_offered_one_counts,
    what_was_cached_before_the_ledger_is_offered_after_a_step,
    an_offer_is_validated_once_by_each_reader,
    no_token_is_that_of_another_ledger_or_of_nothing,
    an_offer_is_worth_nothing_after_its_deadline,
    offers_nobody_validates_are_bounded_and_the_newest_stay,
    a_lookup_of_too_many_hashes_is_answered_for_the_first,
    what_happened_is_counted,
]
