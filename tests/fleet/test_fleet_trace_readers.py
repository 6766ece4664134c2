# SPDX-License-Identifier: Apache-2.0
"""Every format is read as what it means, and what is not what it says is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fleet.trace import Request, TraceError, own, read_trace
from fleet.trace.sessions import FIRST_SHARED_ID

REQUEST = {
    "arrival_s": 1.5,
    "session": "a",
    "turn": 0,
    "input_tokens": 40,
    "output_tokens": 3,
    "hashes": [7, 8],
    "block_tokens": 16,
}
MOONCAKE = {
    "timestamp": 1500,
    "input_length": 1030,
    "output_length": 5,
    "hash_ids": [0, 1, 2],
}
CHAT = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 1.25,
    "input_length": 40,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2, 3],
}
SESSION = {
    "id": "a",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 40,
    "requests": [
        {"t": 0.5, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2], "api_time": 4},
        {
            "t": 10,
            "type": "s",
            "in": 190,
            "out": 8,
            "hash_ids": [1, 2, 3],
            "think_time": 5,
        },
        {
            "t": 70,
            "type": "subagent",
            "agent_id": "explore",
            "tool_tokens": 64,
            "requests": [
                {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [7]},
                {"t": 20.25, "type": "n", "in": 70, "out": 1, "hash_ids": [8]},
                {
                    "t": 30,
                    "type": "subagent",
                    "requests": [
                        {"t": 1, "type": "n", "in": 64, "out": 1, "hash_ids": [9]}
                    ],
                },
            ],
        },
        {
            "t": 80,
            "type": "n",
            "in": 190,
            "out": 8,
            "hash_ids": [1, 2, 3],
            "think_time": 75,
        },
    ],
}
SESSION_B = {
    **SESSION,
    "id": "b",
    "requests": [{"t": 0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 5]}],
}


def put(path: Path, *rows: dict | str, end: str = "\n") -> Path:
    text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + end
    packed = path.suffix == ".gz"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def header(**more: object) -> dict:
    return {"schema": own.SCHEMA, **more}


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


def test_a_missing_or_an_empty_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere: No such file"):
        list(read_trace(tmp_path / "nowhere"))
    with pytest.raises(TraceError, match=r"t: the file is empty"):
        list(read_trace(put(tmp_path / "t", end="")))


def edit(row: dict, **changes: object) -> dict:
    return {**row, **changes}


def with_call(**changes: object) -> dict:
    first, second, agent, last = SESSION["requests"]
    return edit(SESSION, requests=[first, {**second, **changes}, agent, last])


def with_nested(**changes: object) -> dict:
    first, second, agent, last = SESSION["requests"]
    inner, *rest = agent["requests"]
    agent = {**agent, "requests": [{**inner, **changes}, *rest]}
    return edit(SESSION, requests=[first, second, agent, last])


REFUSED = {
    "no known fields": ([{"a": 1}], ["line 1", "fields a", "mooncake"]),
    "not an object": (["[1]"], ["line 1", "object"]),
    "another schema": ([{"schema": "x/2"}], ["line 1", "'x/2'", own.SCHEMA]),
    "an unknown field": ([header(), edit(REQUEST, x=1)], ["line 2", "`x`"]),
    "a missing field": ([header(), {"arrival_s": 0}], ["line 2", "session"]),
    "a turn left out": ([header(), edit(REQUEST, turn=1)], ["line 2", "turn 0 should"]),
    "a turn twice": ([header(), REQUEST, REQUEST], ["line 3", "turn 1 should be"]),
    "fewer than counted": (
        [header(requests=2), REQUEST],
        ["line 2", "after 1", "torn"],
    ),
    "two block sizes": (
        [header(), REQUEST, edit(REQUEST, session="b", block_tokens=20)],
        ["line 3", "blocks of 20 tokens after blocks of 16"],
    ),
    "an older request": (
        [header(), REQUEST, edit(REQUEST, session="b", arrival_s=1.4)],
        ["line 3", "arrives at 1.4 s", "1.5 s", "sort"],
    ),
    "a negative time": ([header(), edit(REQUEST, arrival_s=-1)], ["line 2", ">= 0"]),
    "a time that is none": (
        [header(), edit(REQUEST, arrival_s=float("nan"))],
        ["line 2", "invalid"],
    ),
    "an endless time": (
        [header(), json.dumps(REQUEST).replace("1.5", "1e999")],
        ["line 2", "out of range"],
    ),
    "a negative think time": (
        [header(), edit(REQUEST, think_s=-1)],
        ["line 2", ">= 0"],
    ),
    "no input": ([header(), edit(REQUEST, input_tokens=0, hashes=[])], ["line 2"]),
    "a negative output": ([header(), edit(REQUEST, output_tokens=-1)], ["line 2"]),
    "a hash that is none": ([header(), edit(REQUEST, hashes=[-1, 2])], ["line 2"]),
    "a hash too big": ([header(), edit(REQUEST, hashes=[2**63, 2])], ["line 2"]),
    "half a token": ([header(), edit(REQUEST, input_tokens=40.5)], ["line 2", "int"]),
    "too few blocks": (
        [header(), edit(REQUEST, hashes=[7])],
        ["line 2", "1 blocks of 16 tokens are 16", "40", "--block-tokens"],
    ),
    "mooncake, another block size": (
        [MOONCAKE, edit(MOONCAKE, input_length=9000)],
        ["line 2", "3 blocks of 512 tokens are 1536 tokens", "9000"],
    ),
    "mooncake, just too few tokens": (
        [edit(MOONCAKE, input_length=1023)],
        ["line 1", "1023"],
    ),
    "mooncake, a text as hash": ([edit(MOONCAKE, hash_ids=["x"])], ["line 1", "str"]),
    "mooncake, back in time": (
        [MOONCAKE, edit(MOONCAKE, timestamp=0)],
        ["line 2", "sort"],
    ),
    "bailian, a chat twice": ([CHAT, CHAT], ["line 2", "chat_id 5 is there twice"]),
    "bailian, another block size": ([edit(CHAT, input_length=99)], ["line 1", "99"]),
    "bailian, no hashes": ([{"chat_id": 1}], ["line 1", "required"]),
    "sessions, another scope": (
        [SESSION, edit(SESSION_B, hash_id_scope="global")],
        ["line 2", "'global'"],
    ),
    "sessions, no requests": ([edit(SESSION, requests=[])], ["line 1", "without"]),
    "sessions, twice": ([SESSION, SESSION], ["line 2", "session 'a' is there twice"]),
    "sessions, two block sizes": (
        [SESSION_B, edit(SESSION, block_size=32)],
        ["line 2", "blocks of 32 tokens after blocks of 64"],
    ),
    "sessions, another block size": (
        [edit(SESSION, block_size=16)],
        ["line 1", "session 'a'", "at 0.5 s", "2 blocks of 16 tokens", "130"],
    ),
    "sessions, back in time": ([with_call(t=0.25)], ["line 1", "0.25 s", "0.5 s"]),
    "sessions, a hash that is none": (
        [SESSION_B, with_call(hash_ids=[1, "b", 3])],
        ["line 2", "hash_ids", "str"],
    ),
    "sessions, no input": ([with_call(**{"in": 0, "hash_ids": []})], ["no input"]),
    "sessions, within a sub-agent": (
        [with_nested(hash_ids=[1, 2, 3])],
        ["line 1", "session 'a.explore'", "192", "64"],
    ),
    "not JSON": ([MOONCAKE, "{"], ["line 2", "mend or remove"]),
    "an empty line": ([MOONCAKE, "", MOONCAKE], ["line 2", "mend or remove"]),
    "an abyss": ([MOONCAKE, '{"x":' + "[" * 100_000], ["line 2", "recursion"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_what_it_says_is_refused_with_its_place(tmp_path, what):
    rows, says = REFUSED[what]
    path = put(tmp_path / "t.jsonl", *rows)
    with pytest.raises(TraceError) as refusal:
        list(read_trace(path))
    for part in [str(path), *says]:
        assert part in str(refusal.value)


@pytest.mark.parametrize("kept", range(1, len(json.dumps(MOONCAKE)), 7))
def test_a_torn_line_is_refused(tmp_path, kept):
    row = json.dumps(MOONCAKE)
    path = put(tmp_path / "t", MOONCAKE, row[:kept], end="")
    with pytest.raises(TraceError, match=r"line 2: the file ends within the line"):
        list(read_trace(path))


def test_a_last_line_without_its_end_is_whole_if_it_can_be_read(tmp_path):
    assert len(list(read_trace(put(tmp_path / "t", MOONCAKE, MOONCAKE, end="")))) == 2


@pytest.mark.parametrize("lost", [1, 8, 9, 200])
def test_torn_gzip_data_is_refused(tmp_path, lost):
    path = put(tmp_path / "t.gz", *[MOONCAKE] * 2000)
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(TraceError, match=r"line \d+: torn gzip data"):
        list(read_trace(path))


def test_a_text_that_is_none_is_refused(tmp_path):
    path = tmp_path / "t"
    row = json.dumps({**REQUEST, "session": "???"}).encode()
    path.write_bytes(
        json.dumps(header()).encode() + b"\n" + row.replace(b"???", b"\xff")
    )
    with pytest.raises(TraceError, match="line 2"):
        list(read_trace(path))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = put(tmp_path / "t.gz", *[MOONCAKE] * 2000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"line \d+"):
        list(read_trace(path))
