# SPDX-License-Identifier: Apache-2.0
"""Bodies: what routing reads of them, what it takes out and puts in."""

from __future__ import annotations

import json

import msgspec
import pytest

from fleet.proxy.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fleet.proxy.body import PIECE_BYTES, Body, BodyError
from fleet.proxy.top_level import top_level

WORDS = "the quick brown fox\n" * 2000


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
def test_a_longer_prompt_keeps_the_keys_of_what_it_extends(form: str) -> None:
    short, long = body(**prompts(6)[form]), body(**prompts(9)[form])
    assert short.form == long.form == form
    assert 0 < len(short.keys()) < len(long.keys())
    assert long.keys()[: len(short.keys()) - 1] == short.keys()[:-1]
    assert len(short.keys()) == len(short.prompt) // PIECE_BYTES


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_what_else_decides_what_is_cached_is_in_every_key(field: str) -> None:
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


def test_marks_that_move_from_turn_to_turn_are_in_no_key() -> None:
    before, after = turn(2, "cch=1a2b"), turn(3, "cch=3c4d")
    assert len(before.keys()) > 20
    assert after.keys()[: len(before.keys())] == before.keys()
    assert before.raw.count(b"cache_control") == 4


def test_tools_and_system_prompt_are_the_beginning_of_a_chat() -> None:
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


def test_prompt_tokens_are_counted_for_ids_and_estimated_for_text() -> None:
    for count in (1, 2, 7, 5000):
        assert body(prompt=list(range(count))).prompt_tokens == count
    assert body(prompt="x" * 4000).prompt_tokens == pytest.approx(1000, rel=0.01)


def test_tokens_in_leading_pieces_are_those_that_end_there() -> None:
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
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BodyError):
        Body(raw, APIS[CHAT if b"messages" in raw else COMPLETIONS])


LONG = list(range(100_000, 102_000))


def written(fields: dict, blanks: bool) -> bytes:
    text = json.dumps(fields, separators=None if blanks else (",", ":"))
    return text.encode()


@pytest.mark.parametrize("blanks", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG},
        {"model": "m", "prompt": LONG, "max_tokens": 5, "user": "é]"},
        {"user": '"prompt":[1]', "prompt": LONG},
        {"user": {"prompt": LONG}, "prompt": [1, 2]},
        {"user": {"prompt": LONG}, "prompt": "text"},
        {"user": {"prompt": LONG}},
        {"prompt": [LONG, LONG]},
        {"prompt": [*LONG, "a]b", *LONG]},
        {"prompt": [*LONG, {"prompt": 1}]},
        {"prompt": "text", "user": LONG},
    ],
)
def test_long_ids_are_read_as_a_parser_reads_them(fields: dict, blanks: bool) -> None:
    raw = written(fields, blanks)
    assert top_level(raw) == msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def test_of_two_prompts_the_last_one_counts_however_long_they_are() -> None:
    one, other = json.dumps(LONG), json.dumps(LONG[1:])
    for first, last in [(one, other), (one, "[1]"), ("[1]", other), (one, '"text"')]:
        raw = f'{{"prompt":{first},"prompt":{last}}}'.encode()
        assert Body(raw).prompt == last.encode()


@pytest.mark.parametrize(
    "raw",
    [
        written({"prompt": LONG}, True)[:-2],  # neither array nor object is closed
        written({"prompt": LONG}, True)[:-1],
        written({"prompt": LONG}, True) + b"}",
        written({"prompt": LONG}, True).replace(b"101000", b'"'),
        written({"prompt": LONG}, True).replace(b"101000", b"nul"),
    ],
)
def test_a_long_prompt_that_is_torn_is_refused(raw: bytes) -> None:
    with pytest.raises(BodyError):
        Body(raw)


def test_transfer_params_beside_long_ids_are_found() -> None:
    fields = {"prompt": LONG, "kv_transfer_params": {"x": 1}}
    for raw in (written(fields, False), written(dict(reversed(fields.items())), False)):
        assert msgspec.json.decode(Body(raw).raw) == {"prompt": LONG}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{"direct_read":{}},"prompt":"p"}',
        b'{"kv\\u005ftransfer_params":{"x":1},"prompt":"p"}',
        b'{"kv_transfer_params":1,"prompt":"p","kv_transfer_params":{"x":1}}',
        b'{"prompt":"p","vllm_xargs":{"kv_transfer_params":"x"}}',
        b'{"prompt":"p","vllm_xargs":{"kv_transfer\\u005fparams":"x","top":1}}',
    ],
)
def test_clients_cannot_say_where_kv_comes_from(raw: bytes) -> None:
    sent = msgspec.json.decode(Body(raw).raw)
    assert sent["prompt"] == "p"
    assert "transfer" not in json.dumps(sent)
    assert sent.get("vllm_xargs", {}).get("top") in (None, 1)


def test_a_body_without_transfer_params_is_sent_on_byte_for_byte() -> None:
    raw = b' { "prompt" : [1,  2],"x":1.50, "y":"\\u00e9" } '
    assert Body(raw).raw == raw


def test_transfer_params_are_spliced_in_and_the_rest_stays() -> None:
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
def test_only_one_answer_to_one_prompt_can_be_offloaded(fields, single) -> None:
    assert body(**fields).single is single
