# SPDX-License-Identifier: Apache-2.0
"""Reuse is what sets and an ordered dict of prefixes count, however it is batched."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.trace import batches, prefixes
from fleet.trace.batches import SessionNumbers, session_keys
from fleet.trace.lru import LruCache
from fleet.trace.prefixes import OwnerTable, prefix_keys
from fleet.trace.reuse import Reuse

Prompts = list[tuple[int, list[int]]]


@st.composite
def prompts(draw: st.DrawFn) -> Prompts:
    """Sessions and ids; most extend or cut an earlier prompt, of any session."""
    made: Prompts = []
    for _ in range(draw(st.integers(1, 25))):
        ids: list[int] = []
        if made and draw(st.integers(0, 4)):
            ids = draw(st.sampled_from(made))[1]
            if draw(st.booleans()):
                ids = ids[: draw(st.integers(0, len(ids)))]
        new = draw(st.lists(st.integers(0, 3), max_size=5))
        made.append((draw(st.integers(0, 3)), ids + new))
    return made


def cut(every: Prompts, sizes: list[int]) -> list[Prompts]:
    """Into batches of such sizes, over and over."""
    parts, at = [], 0
    while at < len(every):
        size = sizes[len(parts) % len(sizes)]
        parts.append(every[at : at + size])
        at += size
    return parts


def arrays(part: Prompts) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for _, ids in part])
    flat = np.array([i for _, ids in part for i in ids], np.uint64)
    return prefix_keys(flat, lengths), lengths


def heads(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[: n + 1]) for n in range(len(ids))]


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(deadline=None)
@given(prompts(), sizes)
def test_reuse_is_that_of_sets_of_prefixes(every, sizes):
    seen: set = set()
    intra = cross = 0
    for session, ids in every:
        own = [(session, head) in seen for head in heads(ids)]
        intra += sum(own)
        cross += sum(head in seen for head in heads(ids)) - sum(own)
        seen.update(heads(ids))
        seen.update((session, head) for head in heads(ids))
    numbers, reuse = SessionNumbers(), Reuse()
    for part in cut(every, sizes):
        reuse.add(*arrays(part), numbers.of([str(session) for session, _ in part]))
    assert (reuse.intra_session, reuse.cross_session) == (intra, cross)
    assert reuse.blocks == sum(len(ids) for _, ids in every)
    assert reuse.distinct == len({head for _, ids in every for head in heads(ids)})


@settings(deadline=None)
@given(prompts(), sizes, st.integers(1, 30))
def test_the_lru_cache_is_one_that_moves_block_by_block(every, sizes, blocks):
    cached: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for _, ids in every:
        hits += sum(head in cached for head in heads(ids))
        for head in reversed(heads(ids)):
            cached[head] = None
            cached.move_to_end(head)
        while len(cached) > blocks:
            cached.popitem(last=False)
    cache = LruCache(blocks)
    for part in cut(every, sizes):
        cache.add(*arrays(part))
    assert cache.hits == hits


def test_a_block_behind_another_prefix_is_another_block():
    reuse = Reuse()
    every = [(0, [1, 2, 3]), (1, [9, 2, 3]), (2, [1, 9, 3]), (3, [2, 1, 3])]
    reuse.add(*arrays(every), np.arange(4, dtype=np.int32))
    assert (reuse.intra_session, reuse.cross_session) == (0, 1)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=8))
def test_a_key_belongs_to_who_came_first(parts):
    # Multiples of 8 collide in small tables; 0 marks a free slot there.
    table, owners = OwnerTable(), {}
    table._allocate(8)
    next_owner = 0
    for part in parts:
        mine = np.arange(next_owner, next_owner + len(part), dtype=np.int32)
        next_owner += len(part)
        expected = []
        for key, owner in zip(part, mine.tolist(), strict=True):
            expected.append(owners.get(key, -1))
            owners.setdefault(key, owner)
        claimed = table.claim(np.array(part, np.uint64) * np.uint64(8), mine)
        assert claimed.tolist() == expected
        assert table.size == len(owners)


def test_a_table_keeps_what_it_has_when_it_grows():
    table = OwnerTable()
    keys = prefixes.mix(np.arange(200_000, dtype=np.uint64))
    owners = np.arange(200_000, dtype=np.int32)
    assert (table.claim(keys, owners) == -1).all()
    assert (table.claim(keys, owners[::-1].copy()) == owners).all()


def test_keys_tell_a_million_prefixes_apart():
    keys = prefix_keys(np.zeros(1_000_000, np.uint64), np.array([1_000_000]))
    assert len(np.unique(keys)) == len(keys)


def test_session_keys_are_the_same_in_every_process():
    assert session_keys(["a", ""]).tolist() == [
        3405396810240292928,
        13020603013274838756,
    ]


@pytest.mark.parametrize("limit", ["BATCH_BLOCKS", "BATCH_REQUESTS"])
def test_batches_hold_the_whole_trace_in_order(monkeypatch, limit):
    monkeypatch.setattr(batches, limit, 5)
    requests = [batches.Request(0, str(n), 0, n, 1, [n] * n, 1) for n in range(1, 12)]
    parts = list(batches.batches(requests))
    assert [r for part in parts for r in part.requests] == requests
    assert np.concatenate([part.ids for part in parts]).tolist() == [
        n for n in range(1, 12) for _ in range(n)
    ]
    assert [len(r.hashes) for r in requests] == [
        n for part in parts for n in part.lengths.tolist()
    ]
    assert len(parts) > 1
