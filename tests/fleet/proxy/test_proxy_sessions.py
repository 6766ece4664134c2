# SPDX-License-Identifier: Apache-2.0
"""A request that names no session belongs to the one whose prompt it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_lab import ask, named, post, proxy

from fleet.proxy.apis import APIS, CHAT
from fleet.proxy.body import PIECE_BYTES, Body
from fleet.proxy.sessions import MAX_ALIKE, Sessions
from fleet.standin.process import Standin
from fleet.trace import Request, read_trace
from fleet.trace.prompts import prompt
from lab.paths import REPOSITORY

SYSTEM = "You are an agent. " * 400


def of_ids(ids: list[int], model: str = "m") -> Body:
    return Body(msgspec.json.encode({"model": model, "prompt": ids}))


def chat(*said: str) -> Body:
    roles = ["user", "assistant"] * len(said)
    turns = [
        {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
    ]
    messages = [{"role": "system", "content": SYSTEM}, *turns]
    return Body(json.dumps({"model": "m", "messages": messages}).encode(), APIS[CHAT])


def test_a_turn_is_of_the_session_that_it_goes_on() -> None:
    sessions = Sessions()
    mine, other = sessions.of(chat("Read a.")), sessions.of(chat("Read b."))
    assert mine != other  # although they share the system prompt
    assert sessions.of(chat("Read a.", "It says 1.", "And b?")) == mine
    assert sessions.of(chat("Read b.", "It says 2.", "And a?")) == other
    # Tried again, or with another question at the same place.
    assert sessions.of(chat("Read a.", "It says 1.", "And b?")) == mine
    assert sessions.of(chat("Read a.", "It says 1.", "And c?")) == mine
    assert sessions.of(chat("Read abc.", "It says 3.", "So?")) not in (mine, other)


def test_a_short_prompt_and_another_model_are_of_no_session_known() -> None:
    sessions, ids = Sessions(), list(range(1000, 3000))
    assert sessions.of(of_ids(ids[:100])) is None
    mine = sessions.of(of_ids(ids))
    assert sessions.of(of_ids([*ids, 1], model="other")) != mine
    assert sessions.of(of_ids([*ids, 1])) == mine


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 700)), min_size=1, max_size=30)
)
def test_every_turn_that_only_adds_is_found_wherever_pieces_end(turns) -> None:
    """Five sessions with a common beginning, which take turns in any order."""
    sessions, names = Sessions(), {}
    common = [7] * PIECE_BYTES
    said = {number: [*common, number] for number in range(5)}
    for number, more in turns:
        said[number] = [*said[number], *([number + 10] * more)]
        name = sessions.of(of_ids(said[number]))
        assert names.setdefault(number, name) == name
    assert len(set(names.values())) == len(names)


def test_of_turns_that_end_alike_the_last_ones_are_kept() -> None:
    sessions = Sessions()
    names = [sessions.of(chat(f"{number}")) for number in range(MAX_ALIKE + 1)]
    found = [
        sessions.of(chat(f"{number}", "So.", "x" * 5000))
        for number in range(MAX_ALIKE + 1)
    ]
    assert found[1:] == names[1:]
    assert found[0] not in names


def whole_blocks(file: Path) -> Iterator[Request]:
    """What follows the last whole block is new in each turn of a trace's prompts."""
    for request in read_trace(file, share_prefix=True):
        whole = min(len(request.hashes) * request.block_tokens, request.input_tokens)
        if whole:
            yield msgspec.structs.replace(request, input_tokens=whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["le62k", pytest.param("any", marks=pytest.mark.long)])
def test_no_request_of_the_traces_is_taken_for_another_sessions(name: str) -> None:
    sessions, owners, seen = Sessions(), {}, set()
    requests = missed = 0
    for request in whole_blocks(
        REPOSITORY / f"traces/claude_code_sessions_{name}.jsonl.gz"
    ):
        requests += 1
        found = sessions.of(of_ids(prompt(request, 50_000).tolist()))
        missed += found not in owners and request.session in seen
        assert owners.setdefault(found, request.session) == request.session
        seen.add(request.session)
    print(f"{requests} requests, {len(seen)} sessions, {missed} turns not found")
    assert missed < 0.03 * (requests - len(seen))


@pytest.mark.slow
def test_agents_without_a_header_stay_where_they_are(
    started: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(started), "linear") as on:
        said = list(range(10_000, 11_000))
        for turn in range(3):
            asked = ask([*said, *range(turn * 100)], max_tokens=1)
            assert post(on.url, asked, X_Request_Id=f"{turn}").status == 200
            on.end(f"{turn}")
        post(on.url, ask(said), X_Session_Id="mine", X_Request_Id="named")
        on.end("named")
        first, *others, named_one = on.lines("decision")
        assert first["session"] == "kvtax/0"
        assert {one["session"] for one in others} == {"kvtax/0"}
        assert {one["snapshot"]["pinned"] for one in others} == {first["instance"]}
        assert named_one["session"] == "mine"
        assert [end["session"] for end in on.lines("end")][-1] == "mine"
