# SPDX-License-Identifier: Apache-2.0
"""Every trace format is read as what it means."""

from __future__ import annotations

import pytest
from trace_rows import CHAT, MOONCAKE, REQUEST, SESSION, SESSION_B, header, put

from fleet.trace import Request, TraceError, own, read_trace
from fleet.trace.sessions import FIRST_SHARED_ID


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_our_own_format_comes_back_as_it_was_written(tmp_path, name):
    requests = [
        Request(0.0, "a", 0, 40, 3, [7, 2**63 - 1], 16),
        Request(0.25, "b", 0, 16, 0, [9], 16, None, "a"),
        Request(0.5, "a", 1, 50, 3, [7, 8, 9], 16, 0.125),
    ]
    path = tmp_path / name
    own.write(path, {"requests": 3, "source": "here"}, requests)
    assert list(read_trace(path)) == requests
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_is_unpacked_for_what_it_is_not_for_its_name(tmp_path):
    packed = put(tmp_path / "t.gz", header(), REQUEST)
    assert len(list(read_trace(packed.rename(tmp_path / "t.jsonl")))) == 1


def test_mooncake_requests_are_sessions_of_one_turn(tmp_path):
    path = put(tmp_path / "t", {**MOONCAKE, "timestamp": 0}, MOONCAKE)
    first, second = read_trace(path)
    assert second == Request(1.5, "1", 0, 1030, 5, [0, 1, 2], 512)
    assert (first.session, first.turn, first.think_s) == ("0", 0, None)


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
    requests = list(read_trace(path, session_interval_s=7))
    assert [(r.arrival_s, r.session, r.turn, r.parent) for r in requests] == [
        (0.5, "a", 0, None),
        (7, "b", 0, None),
        (10, "a", 1, None),
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


def test_prompts_of_equal_length_are_shared_on_request(tmp_path):
    other = {**SESSION_B, "id": "c", "system_tokens": 41}
    path = put(tmp_path / "t", SESSION, SESSION_B, other)
    hashes: dict[str, list[list[int]]] = {}
    for request in read_trace(path, share_prefix=True):
        hashes.setdefault(request.session, []).append(request.hashes)
    shared = hashes["b"][0][:2]  # 140 tokens are two whole blocks
    assert shared == [FIRST_SHARED_ID, FIRST_SHARED_ID + 1]
    assert [turn[:2] for turn in hashes["a"]] == [shared] * 3
    assert hashes["a"][1][2] == hashes["a"][2][2] < FIRST_SHARED_ID
    assert set(hashes["c"][0]).isdisjoint(shared)
    assert hashes["a.explore"][0][0] not in shared


def test_a_sub_agent_that_begins_like_its_session_has_the_same_blocks(tmp_path):
    agent = {
        "t": 3,
        "type": "subagent",
        "tool_tokens": 192,
        "requests": [{"t": 0, "type": "n", "in": 192, "out": 1, "hash_ids": [1, 2, 9]}],
    }
    session = {**SESSION, "requests": [SESSION["requests"][0], agent]}
    parent, child = read_trace(put(tmp_path / "t", session), share_prefix=True)
    assert child.hashes[:2] == parent.hashes
    assert child.hashes[2] < FIRST_SHARED_ID


@pytest.mark.parametrize("tokens", [16, 48])
def test_one_block_more_or_less_is_no_other_block_size(tmp_path, tokens):
    path = put(tmp_path / "t", header(), {**REQUEST, "input_tokens": tokens})
    assert [request.input_tokens for request in read_trace(path)] == [tokens]
