# SPDX-License-Identifier: Apache-2.0
"""`kvtax trace stats`: real traces are as published, reuse is as counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fleet.tests.trace.trace_commands import (
    ANY,
    CONVERSATION,
    LE62K,
    run,
    stats,
    trace_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax_fleet.trace import Request, write_trace
from kvtax_fleet.trace import reuse as trace_reuse
from kvtax_fleet.trace.reuse import LruCache, Reuse, prefix_keys

pytestmark = pytest.mark.usefixtures("signals")


# What fleet/docs/traces.md and the sources say of these files.
@pytest.mark.parametrize(
    ("file", "requests", "sessions", "blocks", "reuse"),
    [
        (CONVERSATION, 12_031, 12_031, 288_500, 0.366),
        (LE62K, 734, 44, 384_095, 0.919),
        pytest.param(ANY, 6_493, 124, 13_187_022, 0.961, marks=pytest.mark.slow),
    ],
)
def test_real_traces_are_as_their_readme_says(
    capsys, file, requests, sessions, blocks, reuse
):
    result = stats(capsys, file)
    assert (result["requests"], result["sessions"]) == (requests, sessions)
    assert result["blocks"] == blocks
    assert round(result["apc_infinite"], 3) == reuse
    assert result["distinct_blocks"] == round(blocks * (1 - result["apc_infinite"]))
    if file == CONVERSATION:
        assert result["intra_session_reuse"] == 0
    else:
        # Sub-agents of a session begin alike; sessions share nothing.
        assert result["cross_session_reuse"] < 0.001


@pytest.mark.slow
def test_lengths_of_the_conversation_trace_are_as_published(capsys):
    result = stats(capsys, CONVERSATION)
    assert round(result["input_tokens"]["mean"]) == 12_035
    assert round(result["output_tokens"]["mean"]) == 343
    assert round(result["io_ratio"], 1) == 35.1


@pytest.mark.slow
def test_a_cache_of_all_distinct_blocks_hits_what_an_infinite_one_does(capsys):
    distinct = stats(capsys, LE62K)["distinct_blocks"]
    full = stats(capsys, LE62K, "--cache-blocks", distinct)
    assert full["apc_lru"] == full["apc_infinite"]
    half = stats(capsys, LE62K, "--cache-blocks", distinct // 10)
    assert 0 < half["apc_lru"] < full["apc_lru"]


def test_turns_growth_and_shares_are_those_of_the_sessions(tmp_path, capsys):
    sessions = {f"s{n}": [(n, 4)] for n in range(6)}
    sessions["long"] = [(0.5, 5), (2.5, 9), (7.5, 16)]
    result = stats(capsys, trace_of(tmp_path / "t", sessions))
    assert result["turns_per_session"]["mean"] == pytest.approx(9 / 7)
    assert result["context_growth_tokens"] == {
        "n": 2,
        "mean": 5.5,
        "p50": 5.5,
        "p90": 6.7,
        "p99": 6.97,
        "max": 7.0,
    }
    assert result["top_sessions_share_of_requests"] == pytest.approx(7 / 9)
    assert result["top_sessions_share_of_input_tokens"] == pytest.approx(46 / 54)
    assert result["duration_s"] == 7.5


def test_the_largest_sessions_have_a_row_each(tmp_path, capsys):
    sessions = {
        "short": [(0, 9)],
        "grows": [(0.5, 4), (2, 16), (4, 12)],
        "a|b": [(1, 8), (3, 4)],
    }
    trace = trace_of(tmp_path / "t", sessions)
    result = stats(capsys, trace)
    assert result["largest_sessions"] == [
        {
            "session": "grows",
            "turns": 3,
            "input_tokens": 32,
            "output_tokens": 30,
            "first_input_tokens": 4,
            "longest_input_tokens": 16,
            "growth_tokens": 8,
        },
        {
            "session": "a|b",
            "turns": 2,
            "input_tokens": 12,
            "output_tokens": 20,
            "first_input_tokens": 8,
            "longest_input_tokens": 8,
            "growth_tokens": -4,
        },
        {
            "session": "short",
            "turns": 1,
            "input_tokens": 9,
            "output_tokens": 10,
            "first_input_tokens": 9,
            "longest_input_tokens": 9,
            "growth_tokens": 0,
        },
    ]
    assert result["input_tokens_per_session"]["mean"] == pytest.approx(53 / 3)
    assert result["output_tokens_per_session"]["max"] == 30
    # Of a session with one turn nobody can tell how it grows.
    assert result["growth_tokens_per_session"]["n"] == 2
    assert result["growth_tokens_per_session"]["mean"] == 2
    assert result["prefill_share"] == pytest.approx(53 / 113)
    assert run("stats", trace) == 0
    table = capsys.readouterr().out.split("largest sessions")[1].splitlines()[2:]
    assert table[1] == "| a/b | 2 | 12 | 20 | 8 | 8 | -4 |"
    assert len(table) == 3


def test_a_hostile_name_is_shown_and_not_obeyed(tmp_path, capsys):
    requests = [Request(0, "\x1b[2J<img src=x>", 0, 16, 1, [1], 16, None)]
    write_trace(tmp_path / "t\x1b[2J", {"requests": 1}, requests)
    assert run("stats", tmp_path / "t\x1b[2J") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "<img" not in shown
    assert shown.count("\\x1b[2J") == 2


def test_reuse_is_split_into_own_and_other_sessions(tmp_path, capsys):
    def asks(name: str, turn: int, hashes: list[int]) -> Request:
        tokens, think_s = 16 * len(hashes), 1.0 if turn else None
        return Request(turn, name, turn, tokens, 1, hashes, 16, think_s)

    requests = [
        asks("a", 0, [1, 2]),
        asks("b", 0, [1, 5]),  # one block of a's
        asks("a", 1, [1, 2, 3]),  # two of its own
        asks("b", 1, [1, 5, 6]),  # two of its own
    ]
    write_trace(tmp_path / "t", {"requests": 4}, requests)
    result = stats(capsys, tmp_path / "t")
    assert result["apc_infinite"] == pytest.approx(5 / 10)
    assert result["intra_session_share_of_reuse"] == pytest.approx(4 / 5)
    alone = stats(capsys, trace_of(tmp_path / "u", {"s": [(0, 4)]}))
    assert alone["intra_session_share_of_reuse"] is None


@pytest.mark.slow
def test_stats_are_markdown_unless_told_otherwise(capsys):
    assert run("stats", LE62K, "--cache-blocks", 9000) == 0
    out = capsys.readouterr().out
    assert "| APC, infinite cache | 91.9 % |" in out
    assert "| APC, LRU cache of 9,000 blocks |" in out


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


@pytest.mark.slow
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
    reuse = Reuse()
    for part in cut(every, sizes):
        reuse.add(*arrays(part), np.array([session for session, _ in part]))
    assert (reuse.intra_session, reuse.cross_session) == (intra, cross)
    assert reuse.blocks == sum(len(ids) for _, ids in every)
    assert reuse.distinct == len({head for _, ids in every for head in heads(ids)})


def test_what_was_used_the_longest_ago_leaves_a_full_cache():
    cache = LruCache(3)
    for ids, hits in [([1, 2], 0), ([5], 0), ([1], 1), ([6], 0), ([5], 1), ([1, 2], 1)]:
        before = cache.hits
        cache.add(*arrays([(0, ids)]))
        assert cache.hits - before == hits
    cache.add(*arrays([(0, [7, 8, 9, 10])]))
    cache.add(*arrays([(0, [7, 8, 9, 10])]))
    assert cache.hits == 3 + 3


def test_a_block_behind_another_prefix_is_another_block():
    reuse = Reuse()
    every = [(0, [1, 2, 3]), (1, [9, 2, 3]), (2, [1, 9, 3]), (3, [2, 1, 3])]
    reuse.add(*arrays(every), np.arange(4, dtype=np.int32))
    assert (reuse.intra_session, reuse.cross_session) == (0, 1)


def test_keys_tell_a_million_prefixes_apart():
    keys = prefix_keys(np.zeros(1_000_000, np.uint64), np.array([1_000_000]))
    assert len(np.unique(keys)) == len(keys)


@pytest.mark.parametrize("limit", ["BATCH_BLOCKS", "BATCH_REQUESTS"])
def test_batches_hold_the_whole_trace_in_order(monkeypatch, limit):
    monkeypatch.setattr(trace_reuse, limit, 5)
    requests = [
        trace_reuse.Request(0, str(n), 0, n, 1, [n] * n, 1) for n in range(1, 12)
    ]
    parts = list(trace_reuse.batches(requests))
    assert [r for part in parts for r in part.requests] == requests
    assert np.concatenate([part.ids for part in parts]).tolist() == [
        n for n in range(1, 12) for _ in range(n)
    ]
    assert [len(r.hashes) for r in requests] == [
        n for part in parts for n in part.lengths.tolist()
    ]
    assert len(parts) > 1
