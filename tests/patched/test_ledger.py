# SPDX-License-Identifier: Apache-2.0
"""Direct read offers only blocks that are written, and only while they stay so.

An offer is for one reader, for a limited time and number of reads. With one thing wrong
in the ledger, one of the tests fails.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from listener_lab import BLOCK_SIZE, cache
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from connectors.direct_read import ledger

NUM_BLOCKS = 8


def new_pool(num_blocks: int = NUM_BLOCKS) -> BlockPool:
    return BlockPool(num_blocks, True, BLOCK_SIZE)


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


PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
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


def test_a_block_evicted_and_cached_again_is_not_what_was_offered(ledger_module):
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
            block = block_map.get_one_block(key)
            pool.free_blocks([block])
            assert cache(pool, b"b") == [block]
            a_step(ledger)
            return block

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


def test_a_ledger_that_is_detached_offers_nothing_again(ledger_module):
    pool, ledger, _ = written(ledger_module, b"a", b"b")
    assert block_ids_offered(ledger, b"a", b"b")
    resets = ledger.lookup([b"a"]).resets
    ledger._cached = None  # so that it raises
    cache(pool, b"c")
    a_step(ledger)
    cache(pool, b"d")
    a_step(ledger)
    for block_hash in (b"a", b"c", b"d"):
        assert block_ids_offered(ledger, block_hash) == []
    # Nor does it read: no peer has its count.
    assert ledger.lookup([b"a"]).resets > resets + 1_000_000


def test_an_offer_says_how_often_the_cache_was_reset(ledger_module):
    pool, ledger, blocks = written(ledger_module, b"a")
    assert ledger.lookup([b"a"]).resets == ledger.resets == 0
    assert not pool.reset_prefix_cache()
    offer = ledger.lookup([b"a"])
    assert (offer.block_ids, offer.resets) == (ids(*blocks), 0)
    assert ledger.validate(offer.token) == 1
    pool.free_blocks(blocks)
    for count in (1, 2):
        assert pool.reset_prefix_cache()
        assert ledger.lookup([b"a"]).resets == count
    cache(pool, b"a")
    a_step(ledger)
    offer = ledger.lookup([b"a"])
    assert (len(offer.block_ids), offer.resets) == (1, 2)


def test_a_lookup_that_a_reset_or_a_weight_update_overtakes_offers_nothing(
    ledger_module,
):
    """Else it could offer blocks of the new weights with the count of the old."""

    def offered(resets: bool):
        pool, ledger, blocks = written(ledger_module, b"a")
        pool.free_blocks(blocks)
        old_map = pool.cached_block_hash_to_block

        class Overtaken:
            @staticmethod
            def get_one_block(key):
                pool.cached_block_hash_to_block = old_map
                (block,) = blocks
                if resets:
                    assert pool.reset_prefix_cache()
                    (block,) = cache(pool, b"a")
                else:
                    ledger.on_weight_update()
                    ledger.on_block_cached(block.block_hash, block.block_id)
                a_step(ledger)
                return block

        with changed(pool, "cached_block_hash_to_block", Overtaken):
            return ledger.lookup([b"a"])

    for resets in (True, False):
        offer = offered(resets)
        assert (offer.block_ids, offer.stopped) == ([], "absent")


def test_nothing_cached_before_a_weight_update_is_offered_after_it(ledger_module):
    pool, ledger, _ = written(ledger_module, b"a")
    before = ledger.lookup([b"a"])
    assert before.weight_updates == 0
    ledger.on_weight_update()
    assert ledger.lookup([b"a"]).stopped == "absent"
    # A peer that has the weights of before may finish its read.
    assert ledger.validate(before.token) == 1
    again = cache(pool, b"b")
    a_step(ledger)
    offer = ledger.lookup([b"b"])
    assert (offer.block_ids, offer.weight_updates) == (ids(*again), 1)
    assert (offer.resets, ledger.changes()) == (0, (0, 1))


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


def test_an_offer_is_validated_once_by_each_reader(ledger_module):
    pool = new_pool()
    for readers in (1, 3):
        ledger = ledger_module.BlockLedger(pool, readers)
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


def test_no_token_is_that_of_another_ledger_or_of_nothing(ledger_module):
    """As after a restart: the reader asks the new process about the old one's offer."""
    pool = new_pool()
    ledgers = [ledger_module.BlockLedger(pool) for _ in range(2)]
    cache(pool, b"a")
    for each in ledgers:
        a_step(each)
    tokens = [each.lookup([b"a"]).token for each in ledgers for _ in range(20)]
    assert len(set(tokens)) == 40
    assert all(0 < token < 1 << 63 for token in tokens)
    assert not any(ledgers[1].validate(token) for token in tokens[:20])
    assert ledgers[1].validate(0) == 0
    assert all(ledgers[1].validate(token) == 1 for token in tokens[20:])


def test_an_offer_is_worth_nothing_after_its_deadline(ledger_module):
    _, ledger, _ = written(ledger_module, b"a")
    now_s = [1_000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    with changed(ledger_module, "time", clock):
        early, late = ledger.lookup([b"a"]), ledger.lookup([b"a"])
        now_s[0] += ledger_module.TOKEN_LIFETIME_S - 0.1
        assert ledger.validate(early.token) == 1
        kept = ledger.lookup([b"a"])
        now_s[0] += 0.2
        assert ledger.validate(late.token) == 0
        assert ledger.counters.tokens_expired == 1
        assert ledger.validate(kept.token) == 1
        # Nobody validates, and yet they go.
        ledger.lookup([b"a"])
        now_s[0] += ledger_module.TOKEN_LIFETIME_S + 0.1
        ledger.lookup([b"a"])
        assert len(ledger._held) == 1


def test_offers_nobody_validates_are_bounded_and_the_newest_stay(ledger_module):
    _, ledger, _ = written(ledger_module, b"a", b"b", b"c")
    with changed(ledger_module, "MAX_TOKENS", 10):
        tokens = [ledger.lookup([b"a"]).token for _ in range(100)]
        assert len(ledger._held) == 10
        assert [ledger.validate(token) for token in tokens] == [0] * 90 + [1] * 10
    with changed(ledger_module, "MAX_HELD_BLOCKS", 30):
        tokens = [ledger.lookup([b"a", b"b", b"c"]).token for _ in range(100)]
        assert ledger._num_held_blocks == 30
        assert [ledger.validate(token) for token in tokens] == [0] * 90 + [3] * 10
    assert ledger._num_held_blocks == 0
    assert not ledger._held


def test_a_lookup_of_too_many_hashes_is_answered_for_the_first(ledger_module):
    _, ledger, _ = written(ledger_module, b"a")
    offer = ledger.lookup([b"a"] * (ledger_module.MAX_HASHES + 5))
    assert len(offer.block_ids) == ledger_module.MAX_HASHES


def test_what_happened_is_counted(ledger_module):
    pool, ledger, blocks = written(ledger_module, b"a", b"b")
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


MUTANTS = {
    "in flight is not excluded": ("if step > self._steps_done:", "if False:"),
    "a step too early": ("step > self._steps_done", "step > self._steps_done + 1"),
    "cached in the last step": ("self._steps_begun + 1)", "self._steps_begun)"),
    "any block will do": ("key != wanted or ", ""),
    "any hash will do": (
        "key != wanted or key is not block.block_hash", "key != wanted"),
    "listener not waited for": ("key is not block.block_hash:", "False:"),
    "equal is not identical, lookup": (
        "key is not block.block_hash:", "key != block.block_hash:"),
    "equal is not identical, validate": (
        "if block.block_hash is not key:", "if block.block_hash != key:"),
    "nothing is validated": ("if block.block_hash is not key:", "if False:"),
    "not only the leading run": ("                break\n            num_valid",
        "                continue\n            num_valid"),
    "late listener knows the map's keys": (
        "if block.block_hash is not None:", "if False:"),
    "changing maps are not expected": ("RuntimeError, StopIteration", "KeyError"),
    "unmatched steps go on": ("self._steps_done = -NEVER", "pass"),
    "offers have no deadline": ("oldest.deadline_s > time.monotonic()", "True"),
    "any number of offers": ("len(self._held) < MAX_TOKENS", "True"),
    "any number of blocks in offers": (
        "self._num_held_blocks + num_blocks <= MAX_HELD_BLOCKS", "True"),
    "tokens are numbers": ("secrets.randbits(62) + 1", "self.counters.lookups"),
    "one reader": ("if held.readers > 1:", "if False:"),
    "any number of readers": ("readers=held.readers - 1", "readers=held.readers"),
    "offers are never forgotten": ("        else:\n            self._forget(token)",
        "        else:\n            pass"),
    "held blocks are not given back": ("self._num_held_blocks -= len(", "len("),
    "resets are not counted": ("self.resets += 1", "pass"),
    "changes are not looked for": ("if self.changes() != changes:", "if False:"),
    "weight updates are not counted": ("self.weight_updates += 1", "pass"),
    "old weights are offered": ("[None] * len(self._cached)", "self._cached"),
    "any number of hashes": ("hashes[:MAX_HASHES]", "hashes"),
}  # fmt: skip


TESTS = [
    function for name, function in list(globals().items()) if name.startswith("test_")
]


def mutant(old: str, new: str) -> types.ModuleType:
    """The ledger's module again, from its edited text."""
    text = Path(ledger.__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    module = types.ModuleType("mutant")
    # Dataclasses look their module up.
    sys.modules["mutant"] = module
    exec(compile(text.replace(old, new), ledger.__file__, "exec"), vars(module))
    return module


def fails(test: Callable, module: types.ModuleType) -> bool:
    try:
        test(module)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_ledger_with_one_thing_wrong_is_noticed(name):
    module = mutant(*MUTANTS[name])
    assert any(fails(test, module) for test in TESTS)
