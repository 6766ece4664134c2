# SPDX-License-Identifier: Apache-2.0
"""A prompt is the same however its JSON is written; what clients must not set goes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax_fleet.proxy.apis import APIS, CHAT, COMPLETIONS
from kvtax_fleet.proxy.body import PIECE_BYTES, Body, BodyError

GREETING = "你好世界 这是一个系统提示 <tag> & \u2028 é 👋 " * 300
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"é": 1}}}
FIELDS: dict[str, dict[str, Any]] = {
    "text": {"prompt": GREETING},
    "ids": {"prompt": list(range(2000))},
    "chat": {
        "messages": [
            {"role": "system", "content": GREETING},
            {"role": "user", "content": [{"type": "text", "text": "which?"}]},
        ],
        "tools": [TOOL],
    },
}


def escaped_html(value: Any) -> bytes:
    """As Go writes it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode()


ENCODINGS = {
    "Python": lambda value: json.dumps(value).encode(),
    "openai": lambda value: json.dumps(
        value, ensure_ascii=False, separators=(",", ":")
    ).encode(),
    "Go": escaped_html,
    "indented": lambda value: json.dumps(value, indent=2).encode(),
    "sorted": lambda value: json.dumps(value, sort_keys=True).encode(),
    "escaped slashes": lambda value: json.dumps(value).replace("/", "\\/").encode(),
}


@pytest.mark.parametrize("form", FIELDS)
def test_tokens_and_keys_are_of_the_decoded_prompt_in_every_encoding(form):
    api = APIS[CHAT if form == "chat" else COMPLETIONS]
    fields = {"model": "mödel/1", **FIELDS[form]}
    bodies = [Body(encode(fields), api) for encode in ENCODINGS.values()]
    first = bodies[0]
    assert first.form == form
    assert len(first.keys()) > 2
    assert all(body.keys() == first.keys() for body in bodies)
    assert {body.prompt_tokens for body in bodies} == {first.prompt_tokens}


@given(st.text(), st.booleans())
def test_any_text_counts_alike_in_both_encodings(text, is_chat):
    messages = {"messages": [{"role": "user", "content": text}]}
    fields = messages if is_chat else {"prompt": text}
    api = APIS[CHAT if is_chat else COMPLETIONS]
    escaped = Body(json.dumps(fields).encode(), api)
    plain = Body(json.dumps(fields, ensure_ascii=False).encode(), api)
    assert escaped.prompt == plain.prompt
    assert escaped.prompt_tokens == plain.prompt_tokens


@given(st.lists(st.integers(0, 200_000), min_size=1))
def test_tokens_of_ids_are_exact(ids):
    body = Body(json.dumps({"prompt": ids}).encode())
    assert (body.form, body.prompt_tokens) == ("ids", len(ids))


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=900, max_size=2000), st.integers(1, 900))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(ids, longer):
    short = Body(json.dumps({"prompt": ids}).encode())
    long = Body(json.dumps({"prompt": ids + [7] * longer}).encode())
    whole = len(short.prompt) // PIECE_BYTES
    # The closing bracket of the shorter prompt may be in its last piece.
    assert short.keys()[: whole - 1] == long.keys()[: whole - 1]


def test_what_decides_what_is_cached_is_in_the_keys():
    fields = {"prompt": GREETING, "model": "a"}
    keys = Body(json.dumps(fields).encode()).keys()
    for more in ({"model": "b"}, {"cache_salt": "s"}):
        assert Body(json.dumps(fields | more).encode()).keys() != keys
    other = {"temperature": 0, "max_tokens": 9}
    assert Body(json.dumps(fields | other).encode()).keys() == keys


@pytest.mark.parametrize("place", ["kv_transfer_params", "vllm_xargs"])
def test_a_client_cannot_set_transfer_parameters(place):
    forged = {"remote_host": "evil"}
    value = forged if place == "kv_transfer_params" else {"kv_transfer_params": forged}
    body = Body(json.dumps({"prompt": "x", place: value, "seed": 1}).encode())
    assert b"evil" not in body.raw
    assert json.loads(body.raw)["seed"] == 1


def test_a_prefill_asks_for_one_token_and_keeps_the_rest():
    fields = {"prompt": [1], "stream": True, "stream_options": {}, "max_tokens": 9}
    fields |= {"temperature": 0.5, "min_tokens": 4}
    sent = json.loads(Body(json.dumps(fields).encode()).prefill_only({"a": 1}))
    assert sent == {
        "prompt": [1],
        "temperature": 0.5,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"a": 1},
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"x"',
        b'{"prompt": [1, 2',
        b"\xff",
        b"[" * 200_000,
        b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_object_in_json_is_refused(raw):
    with pytest.raises(BodyError):
        Body(raw, APIS[CHAT])
