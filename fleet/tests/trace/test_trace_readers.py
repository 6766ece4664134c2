# SPDX-License-Identifier: Apache-2.0
"""Every format is read as what it means, and its prompts hit as its hashes do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from fleet.tests.trace.trace_commands import (
    CHAT,
    MOONCAKE,
    REQUEST,
    SESSION,
    SESSION_B,
    header,
    put,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax_fleet.paths import FLEET
from kvtax_fleet.trace import Request, TraceError, read_trace, write_trace
from kvtax_fleet.trace.prompts import prompt

pytestmark = pytest.mark.usefixtures("signals")


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz"])
def test_our_own_format_comes_back_as_it_was_written(tmp_path, name):
    requests = [
        Request(0.0, "a", 0, 40, 3, [7, 2**63 - 1], 16),
        Request(0.25, "b", 0, 16, 0, [9], 16, None, "a"),
        Request(0.5, "a", 1, 50, 3, [7, 8, 9], 16, 0.125),
    ]
    path = tmp_path / name
    write_trace(path, {"requests": 3, "source": "here"}, requests)
    assert list(read_trace(path)) == requests
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_is_unpacked_for_what_it_is_not_for_its_name(tmp_path):
    for packing in ("gz", "xz"):
        packed = put(tmp_path / f"t.{packing}", header(), REQUEST)
        assert len(list(read_trace(packed.rename(tmp_path / "t.jsonl")))) == 1


def test_mooncake_requests_are_sessions_of_one_turn(tmp_path):
    path = put(tmp_path / "t", {**MOONCAKE, "timestamp": 0}, MOONCAKE)
    first, second = read_trace(path)
    assert second == Request(1.5, "1", 0, 1030, 5, [0, 1, 2], 512)
    assert (first.session, first.turn, first.think_s) == ("0", 0, None)


def turns_of_mooncake(tmp_path: Path, *rows: dict) -> list[tuple]:
    """Read rows without lengths: session, turn, arrival, think time."""
    lengths = {"input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
    requests = read_trace(put(tmp_path / "t", *(row | lengths for row in rows)))
    return [(r.session, r.turn, r.arrival_s, r.think_s) for r in requests]


def test_mooncake_rows_in_seconds_are_not_taken_for_milliseconds(tmp_path):
    rows = [{**MOONCAKE, "timestamp": 0.5 * number} for number in range(20)]
    path = put(tmp_path / "t", *rows)
    with pytest.raises(TraceError, match="--time-unit"):
        list(read_trace(path))
    assert [r.arrival_s for r in read_trace(path, time_unit="s")][-1] == 9.5
    assert [r.arrival_s for r in read_trace(path, time_unit="ms")][-1] == 0.0095
    slow = [{**row, "timestamp": 1000 * row["timestamp"] + 0.5} for row in rows]
    assert len(list(read_trace(put(tmp_path / "t", *slow)))) == 20


def test_mooncake_rows_of_one_session_id_are_turns_of_one_session(tmp_path):
    rows = [{"session_id": "s", "timestamp": at} for at in (0, 1000, 3500)]
    assert turns_of_mooncake(tmp_path, *rows) == [
        ("s", 0, 0, None),
        ("s", 1, 1, 1),
        ("s", 2, 3.5, 2.5),
    ]


def test_mooncake_rows_with_and_without_a_session_id_never_share_a_session(tmp_path):
    ids = (None, "", 1, 4, None, 1)
    rows = [{"session_id": name, "timestamp": 0} for name in ids]
    names = [name for name, *_ in turns_of_mooncake(tmp_path, *rows)]
    assert names[2] == names[5]
    assert len(set(names)) == 5


def test_a_mooncake_turn_with_a_delay_comes_so_long_after_the_turn_before(tmp_path):
    rows = [
        {"session_id": "a", "timestamp": 0},
        {"session_id": "a", "delay": 500},
        {"session_id": "a", "delay": 3000},
        {"session_id": 7, "timestamp": 1000},
        # Not before what is above it.
        {"session_id": 7, "delay": 0},
        {"session_id": "b", "timestamp": 4000},
        {"session_id": 7, "delay": 10},
    ]
    assert turns_of_mooncake(tmp_path, *rows) == [
        ("a", 0, 0, None),
        ("a", 1, 0.5, 0.5),
        ("7", 0, 1, None),
        ("7", 1, 1, 0),
        ("a", 2, 3.5, 3),
        ("b", 0, 4, None),
        ("7", 2, 4, 0.01),
    ]


def test_the_block_size_can_be_given_where_the_file_does_not_name_it(tmp_path):
    row = {**MOONCAKE, "input_length": 48}
    (request,) = read_trace(put(tmp_path / "t", row), block_tokens=16)
    assert request.block_tokens == 16
    with pytest.raises(TraceError, match="names its block size"):
        list(read_trace(put(tmp_path / "o", header(), REQUEST), block_tokens=16))


def test_bailian_sessions_are_chains_of_parents_and_forks_are_their_own(tmp_path):
    rows = [
        CHAT,
        {**CHAT, "chat_id": 6, "parent_chat_id": 5, "timestamp": 11.25, "turn": 2},
        {**CHAT, "chat_id": 3, "parent_chat_id": 99, "timestamp": 12, "turn": 4},
        {**CHAT, "chat_id": 8, "parent_chat_id": 5, "timestamp": 13, "turn": 2},
        # Does not extend its parent's ids.
        {
            **CHAT,
            "chat_id": 7,
            "parent_chat_id": 6,
            "timestamp": 14,
            "hash_ids": [1, 9, 4],
        },
    ]
    requests = list(read_trace(put(tmp_path / "t", *rows)))
    assert [(r.session, r.turn, r.parent) for r in requests] == [
        ("5", 0, None),
        ("5", 1, None),
        ("3", 0, None),
        ("8", 0, "5"),
        ("5", 2, None),
    ]
    assert [r.think_s for r in requests] == [None, 10.0, None, None, 2.75]
    assert requests[-1].hashes == [1, 9, 4]
    assert requests[0].block_tokens == 16


def test_sessions_begin_an_interval_apart_and_sub_agents_when_they_are_started(
    tmp_path,
):
    path = put(tmp_path / "t", SESSION, SESSION_B)
    requests = list(read_trace(path))
    assert [(r.arrival_s, r.session, r.turn, r.parent) for r in requests] == [
        (0.5, "a", 0, None),
        (10, "a", 1, None),
        (60, "b", 0, None),
        (70, "a.explore", 0, "a"),
        (80, "a", 2, None),
        (90.25, "a.explore", 1, "a"),
        (101, "a.explore.2", 0, "a.explore"),
    ]


def test_think_time_is_since_the_answer_or_where_that_is_unknown_since_the_turn(
    tmp_path,
):
    think_s = {
        (r.session, r.turn): r.think_s
        for r in read_trace(put(tmp_path / "t", SESSION, SESSION_B))
    }
    # think_time of the third turn counts from the first's answer: not taken.
    assert [think_s["a", turn] for turn in range(3)] == [None, 5, 70]
    assert think_s["a.explore", 1] == 20.25


def test_ids_of_a_session_mean_something_in_it_alone(tmp_path):
    path = put(tmp_path / "t", SESSION, SESSION_B)
    ids: dict[str, set[int]] = {"a": set(), "b": set()}
    for request in read_trace(path):
        ids[request.session[0]].update(request.hashes)
    assert ids["a"].isdisjoint(ids["b"])
    assert (len(ids["a"]), len(ids["b"])) == (6, 2)


@pytest.mark.parametrize("tokens", [16, 48])
def test_one_block_more_or_less_is_no_other_block_size(tmp_path, tokens):
    path = put(tmp_path / "t", header(), {**REQUEST, "input_tokens": tokens})
    assert [request.input_tokens for request in read_trace(path)] == [tokens]


SMALLEST_BLOCK = {32_000: 5, 257: 8, 5: 32, 3: 64, 152_064: 4}
ids = st.integers(0, 2**63 - 1)


def request(hashes: list[int], input_tokens: int, block_tokens: int, **more) -> Request:
    where = {"session": "s", "turn": 0} | more
    return Request(
        0.0, where["session"], where["turn"], input_tokens, 1, hashes, block_tokens
    )


def common(a: list, b: list) -> int:
    """The length of the longest common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Request], int]:
    """Prompts of few ids, with partial last blocks and tails, and a vocabulary."""
    vocab_size = draw(st.sampled_from(sorted(SMALLEST_BLOCK)))
    size = SMALLEST_BLOCK[vocab_size] + draw(st.integers(0, 8))
    some = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    requests = []
    for turn in range(draw(st.integers(2, 6))):
        hashes = draw(st.lists(st.sampled_from(some), max_size=6))
        length = len(hashes) * size + draw(st.integers(-size, size))
        if length > 0:
            requests.append(request(hashes, length, size, turn=turn))
    return requests, vocab_size


@settings(deadline=None)
@given(traces())
def test_prefix_hits_of_tokens_are_those_of_hashes(trace):
    requests, vocab_size = trace
    for entry in requests:
        for other in requests:
            if entry is other:
                continue
            size = entry.block_tokens
            full = min(entry.input_tokens, other.input_tokens) // size
            by_hash = min(common(entry.hashes, other.hashes), full)
            tokens = [prompt(each, vocab_size).tolist() for each in (entry, other)]
            assert common(*tokens) // size == by_hash


@settings(deadline=None)
@given(st.lists(ids, max_size=5), st.integers(1, 40), st.integers(2, 200_000))
def test_a_prompt_has_its_length_and_real_tokens(hashes, offset, vocab_size):
    length = len(hashes) * 64 + offset - 20
    if length < 1 or vocab_size < 3:
        return
    tokens = prompt(request(hashes, length, 64), vocab_size)
    assert (tokens.dtype, tokens.shape) == (np.int32, (length,))
    assert tokens.min() >= 1
    assert tokens.max() < vocab_size


def test_tokens_use_the_whole_vocabulary_evenly():
    tokens = prompt(request(list(range(2000)), 128_000, 64), 1001)
    counts = np.bincount(tokens, minlength=1001)[1:]
    # 128 a token; of 1,000 Poisson counts none is 6 standard deviations off.
    assert counts.min() > 128 - 6 * 128**0.5
    assert counts.max() < 128 + 6 * 128**0.5


@pytest.mark.parametrize("vocab_size", SMALLEST_BLOCK)
def test_neighbouring_ids_have_other_blocks_even_where_blocks_are_smallest(vocab_size):
    size = SMALLEST_BLOCK[vocab_size]
    tokens = prompt(request(list(range(5000)), 5000 * size, size), vocab_size)
    assert len(np.unique(tokens.reshape(5000, size), axis=0)) == 5000
    with pytest.raises(ValueError, match="bigger vocabulary"):
        prompt(request([1], size - 1, size - 1), vocab_size)


def test_a_tail_is_that_of_its_session_and_turn():
    def tail(**where) -> list[int]:
        return prompt(request([1], 128, 64, **where), 32_000)[64:].tolist()

    tails = [tail(), tail(turn=1), tail(session="t"), tail(session="s/0", turn=1)]
    assert len({tuple(each) for each in tails}) == 4
    assert tail() == tails[0]


def test_a_prompt_its_hashes_do_not_cover_is_refused():
    with pytest.raises(ValueError, match="s/0: 1 blocks of 16 tokens are 16"):
        prompt(request([1], 33, 16), 32_000)


def test_every_version_in_every_process_makes_the_same_prompt():
    """Recorded runs stay comparable."""
    made = prompt(request([0, 5, 2**63 - 1], 200, 64), 32_000)
    digest = hashlib.sha256(made.astype("<i4").tobytes()).hexdigest()
    assert digest.startswith("22aacc47820155eb")


def test_the_pages_example_makes_a_trace_of_a_users_log(tmp_path, monkeypatch):
    page = (FLEET / "docs/traces.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    rows = [(0.0, "a", 40, 5.0), (1.0, "b", 32, 2.0), (9.0, "a", 64, 12.0)]
    names = ("time", "session", "prompt_ids", "end")
    logged = [
        dict(zip(names, (time, session, [*range(length)], end), strict=True))
        for time, session, length, end in rows
    ]
    put(tmp_path / "log.jsonl", *(row | {"answer_tokens": 7} for row in logged))
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "traces.md", "exec"), {})
    first, other, second = read_trace(tmp_path / "trace.jsonl.xz")
    assert (first.session, second.session, second.turn) == ("s0", "s0", 1)
    assert second.hashes[:2] == first.hashes[:2] == other.hashes
    assert second.think_s == 4.0
    assert second.input_tokens == 64
