# SPDX-License-Identifier: Apache-2.0
"""Bodies: what routing reads, takes out and puts in; the session that they continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fleet.tests.proxy.proxy_lab import ask, named, post, proxy
from hypothesis import given
from hypothesis import strategies as st
from kvtax.paths import REPOSITORY

from kvtax_fleet.proxy.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from kvtax_fleet.proxy.body import PIECE_BYTES, Body, BodyError
from kvtax_fleet.proxy.session_affinity import MAX_ALIKE, Sessions
from kvtax_fleet.trace import Request, read_trace
from kvtax_fleet.trace.prompts import prompt

WORDS = "the quick brown fox\n" * 2000
# A long prompt whose array and object are still open.
TORN = json.dumps({"prompt": list(range(100_000, 102_000))}).encode()[:-2]


def body(**fields) -> Body:
    raw = json.dumps({"model": "m", **fields}).encode()
    return Body(raw, APIS[CHAT if "messages" in fields else COMPLETIONS])


def prompts(scale: int) -> dict[str, dict]:
    """One prompt in each form; a larger scale extends the smaller one's."""
    turns = [{"role": "user", "content": WORDS[: 500 * n]} for n in range(1, scale)]
    return {
        "ids": {"prompt": list(range(1000 * scale))},
        "text": {"prompt": WORDS[: 4000 * scale]},
        "chat": {"messages": turns},
    }


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_a_longer_prompt_keeps_the_keys_of_what_it_extends(form):
    short, long = body(**prompts(6)[form]), body(**prompts(9)[form])
    assert short.form == long.form == form
    assert 0 < len(short.keys()) < len(long.keys())
    assert long.keys()[: len(short.keys()) - 1] == short.keys()[:-1]
    assert len(short.keys()) == len(short.prompt) // PIECE_BYTES


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_what_else_decides_what_is_cached_is_in_every_key(field):
    one, other = body(prompt=WORDS), body(prompt=WORDS, **{field: "other"})
    assert not set(one.keys()) & set(other.keys())


CLAUDE = {
    "tools": [{"name": "ls", "cache_control": {"type": "ephemeral"}}],
    "system": [{"type": "text", "text": WORDS}],
}


def turn(number: int, billing: str) -> Body:
    """A turn of Claude Code: it marks the last messages, and bills each request."""
    said = []
    for place in range(2 * number + 1):
        block = {"type": "text", "text": f"{place} {WORDS[:3000]}"}
        if place >= 2 * number - 2:
            block["cache_control"] = {"type": "ephemeral"}
        said.append({"role": ("user", "assistant")[place % 2], "content": [block]})
    billed = {"type": "text", "text": f"x-anthropic-billing-header: {billing}"}
    system = [billed, *CLAUDE["system"]]
    fields = {"model": "m", **CLAUDE, "system": system, "messages": said}
    return Body(json.dumps(fields).encode(), APIS[MESSAGES])


def test_marks_that_move_from_turn_to_turn_are_in_no_key():
    before, after = turn(2, "cch=1a2b"), turn(3, "cch=3c4d")
    assert len(before.keys()) > 20
    assert after.keys()[: len(before.keys())] == before.keys()
    assert before.raw.count(b"cache_control") == 4


def test_tools_and_system_prompt_are_the_beginning_of_a_chat():
    tools = [{"name": WORDS}]
    for path, system in ((MESSAGES, "system"), (RESPONSES, "instructions")):
        said = "input" if path == RESPONSES else "messages"
        asked = {"model": "m", said: [{"role": "user", "content": "a"}]}
        asked |= {system: WORDS, "tools": tools}
        one, other = (
            Body(json.dumps({**asked, **changed}).encode(), APIS[path])
            for changed in ({}, {said: [{"role": "user", "content": WORDS}]})
        )
        assert one.form == "chat"
        assert other.keys()[: len(one.keys())] == one.keys()
        assert (
            len(one.keys()) == len(one.prompt) // PIECE_BYTES > 2 * len(WORDS) // 2100
        )


def test_prompt_tokens_are_counted_for_ids_and_estimated_for_text():
    for count in (1, 2, 7, 5000):
        assert body(prompt=list(range(count))).prompt_tokens == count
    assert body(prompt="x" * 4000).prompt_tokens == pytest.approx(1000, rel=0.01)


def test_tokens_in_leading_pieces_are_those_that_end_there():
    ids = list(range(0, 150_000, 7))
    made = body(prompt=ids)
    for pieces in (0, 1, 5, 100):
        text = made.prompt[: pieces * PIECE_BYTES].decode()
        assert made.tokens_in(pieces) == text.count(",")
    assert made.tokens_in(10**6) == len(ids) - 1
    assert body(prompt="x" * 8000).tokens_in(2) == 1024


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'{"prompt":[1,}',
        b"null",
        b"{}x",
        b'{"a\xff": 1}',
        b'{"vllm_xargs": {"a\xff": 1}}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"messages": ["cache_control", "\xff"]}',
        TORN,
        TORN + b"]",
        TORN + b"]}}",
        TORN.replace(b"101000", b'"') + b"]}",
        TORN.replace(b"101000", b"nul") + b"]}",
    ],
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(BodyError):
        Body(raw, APIS[CHAT if b"messages" in raw else COMPLETIONS])


def test_a_body_without_transfer_params_is_sent_on_byte_for_byte():
    raw = b' { "prompt" : [1,  2],"x":1.50, "y":"\\u00e9" } '
    assert Body(raw).raw == raw


def test_transfer_params_are_spliced_in_and_the_rest_stays():
    asked = {"model": "m", "prompt": [1, 2], "stream": True, "min_tokens": 5}
    asked |= {"stream_options": {"include_usage": True}, "max_tokens": 50}
    made = body(**asked)
    pull = msgspec.json.decode(made.with_transfer({"a": 1}))
    assert pull == {**asked, "kv_transfer_params": {"a": 1}}
    prefill = msgspec.json.decode(made.prefill_only({"a": 1}))
    assert prefill == {
        "model": "m",
        "prompt": [1, 2],
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"a": 1},
    }
    chat = body(messages=[], max_completion_tokens=9).prefill_only({})
    assert msgspec.json.decode(chat)["max_completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "single"),
    [
        ({"prompt": [1]}, True),
        ({"prompt": "p", "n": 1}, True),
        ({"messages": [{}]}, True),
        ({"prompt": [1], "n": 2}, False),
        ({"prompt": [1], "use_beam_search": True}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": ["p", "q"]}, False),
    ],
)
def test_only_one_answer_to_one_prompt_can_be_offloaded(fields, single):
    assert body(**fields).single is single


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


def test_a_turn_is_of_the_session_that_it_goes_on():
    sessions = Sessions()
    mine, other = sessions.of(chat("Read a.")), sessions.of(chat("Read b."))
    assert mine != other  # although they share the system prompt
    assert sessions.of(chat("Read a.", "It says 1.", "And b?")) == mine
    assert sessions.of(chat("Read b.", "It says 2.", "And a?")) == other
    # Tried again, or with another question at the same place.
    assert sessions.of(chat("Read a.", "It says 1.", "And b?")) == mine
    assert sessions.of(chat("Read a.", "It says 1.", "And c?")) == mine
    assert sessions.of(chat("Read abc.", "It says 3.", "So?")) not in (mine, other)


def test_a_short_prompt_and_another_model_are_of_no_session_known():
    sessions, ids = Sessions(), list(range(1000, 3000))
    assert sessions.of(of_ids(ids[:100])) is None
    mine = sessions.of(of_ids(ids))
    assert sessions.of(of_ids([*ids, 1], model="other")) != mine
    assert sessions.of(of_ids([*ids, 1])) == mine


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 700)), min_size=1, max_size=30)
)
def test_every_turn_that_only_adds_is_found_wherever_pieces_end(turns):
    """Five sessions with a common beginning, which take turns in any order."""
    sessions, names = Sessions(), {}
    common = [7] * PIECE_BYTES
    said = {number: [*common, number] for number in range(5)}
    for number, more in turns:
        said[number] = [*said[number], *([number + 10] * more)]
        name = sessions.of(of_ids(said[number]))
        assert names.setdefault(number, name) == name
    assert len(set(names.values())) == len(names)


def test_of_turns_that_end_alike_the_last_ones_are_kept():
    sessions = Sessions()
    names = [sessions.of(chat(f"{number}")) for number in range(MAX_ALIKE + 1)]
    found = [
        sessions.of(chat(f"{number}", "So.", "x" * 5000))
        for number in range(MAX_ALIKE + 1)
    ]
    assert found[1:] == names[1:]
    assert found[0] not in names


SHARED, SHARED_BLOCKS = 2**62, 150


def whole_blocks(file: Path) -> Iterator[Request]:
    """What follows the last whole block is new in each turn of a trace's prompts.

    All begin with the same tools and system prompt.
    """
    for request in read_trace(file):
        shared = [SHARED + place for place in range(SHARED_BLOCKS)]
        hashes = [*shared, *request.hashes[SHARED_BLOCKS:]][: len(request.hashes)]
        request = msgspec.structs.replace(request, hashes=hashes)
        whole = min(len(request.hashes) * request.block_tokens, request.input_tokens)
        if whole:
            yield msgspec.structs.replace(request, input_tokens=whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["le62k", pytest.param("any", marks=pytest.mark.long)])
def test_no_request_of_the_traces_is_taken_for_another_sessions(name):
    sessions, owners, seen = Sessions(), {}, set()
    requests = missed = 0
    for request in whole_blocks(
        REPOSITORY / f"fleet/traces/claude_code_sessions_{name}.jsonl.xz"
    ):
        requests += 1
        found = sessions.of(of_ids(prompt(request, 50_000).tolist()))
        missed += found not in owners and request.session in seen
        assert owners.setdefault(found, request.session) == request.session
        seen.add(request.session)
    print(f"{requests} requests, {len(seen)} sessions, {missed} turns not found")
    assert missed < 0.03 * (requests - len(seen))


@pytest.mark.slow
def test_agents_without_a_header_stay_where_they_are(started, tmp_path):
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


def picture(path: str, data: str) -> dict:
    """A message with a picture, as the API writes it."""
    url = f"data:image/png;base64,{data}"
    part = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        MESSAGES: {"type": "image", "source": {"type": "base64", "data": data}},
        RESPONSES: {"type": "input_image", "image_url": url},
    }[path]
    return {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("escape", [False, True])
def test_a_picture_in_base64_is_not_text(path, escape):
    field = "input" if path == RESPONSES else "messages"

    def body_of(data: str, *after: dict) -> Body:
        raw = json.dumps({"model": "m", field: [picture(path, data), *after]}).encode()
        return Body(raw.replace(b"/", b"\\/") if escape else raw, APIS[path])

    large, other = "aB3/" * 400_000, "aB3+" * 400_000
    answer = {"role": "assistant", "content": "A cat. " * 500}
    once, again = body_of(large), body_of(large, answer)
    assert 500 < once.prompt_tokens < 2000
    assert again.keys()[: len(once.keys())] == once.keys()
    assert body_of(other).keys() != once.keys()
    # Where a model reads base64, it is text.
    text = {"role": "user", "content": large}
    raw = json.dumps({"model": "m", "messages": [text]}).encode()
    assert Body(raw, APIS[CHAT]).prompt_tokens > 400_000
