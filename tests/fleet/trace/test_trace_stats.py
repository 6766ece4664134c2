# SPDX-License-Identifier: Apache-2.0
"""`fleet.trace stats`: real traces are as published, small ones as counted by hand."""

from __future__ import annotations

import pytest
from trace_commands import ANY, LE62K, MOONCAKE, run, stats, trace_of

from fleet.trace import Request, own


# What traces/README.md and the sources say of these files.
@pytest.mark.parametrize(
    ("file", "requests", "sessions", "blocks", "reuse"),
    [
        (MOONCAKE, 12_031, 12_031, 288_500, 0.366),
        (LE62K, 734, 44, 384_095, 0.919),
        pytest.param(ANY, 6_493, 124, 13_187_022, 0.961, marks=pytest.mark.slow),
    ],
)
def test_real_traces_are_as_their_readme_says(
    capsys, file, requests, sessions, blocks, reuse
):
    found = stats(capsys, file)
    assert (found["requests"], found["sessions"]) == (requests, sessions)
    assert found["blocks"] == blocks
    assert round(found["apc_infinite"], 3) == reuse
    assert found["distinct_blocks"] == round(blocks * (1 - found["apc_infinite"]))
    if file == MOONCAKE:
        assert found["intra_session_reuse"] == 0
    else:
        # Sub-agents of a session begin alike; sessions share nothing.
        assert found["cross_session_reuse"] < 0.001


def test_lengths_of_the_conversation_trace_are_as_published(capsys):
    found = stats(capsys, MOONCAKE)
    assert round(found["input_tokens"]["mean"]) == 12_035
    assert round(found["output_tokens"]["mean"]) == 343
    assert round(found["io_ratio"], 1) == 35.1


def test_a_cache_of_all_distinct_blocks_hits_what_an_infinite_one_does(capsys):
    distinct = stats(capsys, LE62K)["distinct_blocks"]
    full = stats(capsys, LE62K, "--cache-blocks", distinct)
    assert full["apc_lru"] == full["apc_infinite"]
    half = stats(capsys, LE62K, "--cache-blocks", distinct // 10)
    assert 0 < half["apc_lru"] < full["apc_lru"]


def test_sharing_prompts_moves_nothing_but_first_turns(capsys):
    alone, shared = stats(capsys, LE62K), stats(capsys, LE62K, "--share-prefix")
    assert shared["intra_session_reuse"] == alone["intra_session_reuse"]
    assert shared["cross_session_reuse"] > 0
    assert shared["distinct_blocks"] < alone["distinct_blocks"]


def test_turns_growth_and_shares_are_those_of_the_sessions(tmp_path, capsys):
    sessions = {f"s{n}": [(n, 4)] for n in range(6)}
    sessions["long"] = [(0.5, 5), (2.5, 9), (7.5, 16)]
    found = stats(capsys, trace_of(tmp_path / "t", sessions))
    assert found["turns_per_session"]["mean"] == pytest.approx(9 / 7)
    assert found["context_growth_tokens"] == {
        "n": 2,
        "mean": 5.5,
        "p50": 5.5,
        "p90": 6.7,
        "p99": 6.97,
        "max": 7.0,
    }
    assert found["top_sessions_share_of_requests"] == pytest.approx(7 / 9)
    assert found["top_sessions_share_of_input_tokens"] == pytest.approx(46 / 54)
    assert found["duration_s"] == 7.5


def test_the_largest_sessions_have_a_row_each(tmp_path, capsys):
    sessions = {
        "short": [(0, 9)],
        "grows": [(0.5, 4), (2, 16), (4, 12)],
        "a|b": [(1, 8), (3, 4)],
    }
    trace = trace_of(tmp_path / "t", sessions)
    found = stats(capsys, trace, "--sessions", 2)
    assert found["largest_sessions"] == [
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
    ]
    assert found["input_tokens_per_session"]["mean"] == pytest.approx(53 / 3)
    assert found["output_tokens_per_session"]["max"] == 30
    # Of a session with one turn nobody can tell how it grows.
    assert found["growth_tokens_per_session"]["n"] == 2
    assert found["growth_tokens_per_session"]["mean"] == 2
    assert found["prefill_share"] == pytest.approx(53 / 113)
    assert run("stats", trace) == 0
    table = capsys.readouterr().out.split("largest sessions")[1].splitlines()[2:]
    assert table[1] == "| a/b | 2 | 12 | 20 | 8 | 8 | -4 |"
    assert len(table) == 3


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
    own.write(tmp_path / "t", {"requests": 4}, requests)
    found = stats(capsys, tmp_path / "t")
    assert found["apc_infinite"] == pytest.approx(5 / 10)
    assert found["intra_session_share_of_reuse"] == pytest.approx(4 / 5)
    alone = stats(capsys, trace_of(tmp_path / "u", {"s": [(0, 4)]}))
    assert alone["intra_session_share_of_reuse"] is None


def test_stats_are_markdown_unless_told_otherwise(capsys):
    assert run("stats", LE62K, "--cache-blocks", 9000) == 0
    out = capsys.readouterr().out
    assert "| APC, infinite cache | 91.9 % |" in out
    assert "| APC, LRU cache of 9,000 blocks |" in out
