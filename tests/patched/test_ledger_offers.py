# SPDX-License-Identifier: Apache-2.0
"""What an offer of direct read is worth: to whom, how long, and how often."""

from __future__ import annotations

from types import SimpleNamespace

from ledger_lab import (
    a_step,
    cache,
    changed,
    new_pool,
    written,
)

PATCHES = ["block_pool_delta_listener"]
ONLY = "0.18.1"


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
    for ledger in ledgers:
        a_step(ledger)
    tokens = [ledger.lookup([b"a"]).token for ledger in ledgers for _ in range(20)]
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
