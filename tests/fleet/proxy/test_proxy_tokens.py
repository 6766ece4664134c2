# SPDX-License-Identifier: Apache-2.0
"""Prompts that come as text are routed by their token ids, where these can be told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_lab import named, post, proxy
from tiny_model import CHATML, SPECIAL, ours, tiny_model

from fleet.proxy.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fleet.proxy.body import Body
from fleet.proxy.chats import Unknown
from fleet.proxy.tokenizer import Tokenizer, TokenizerError
from fleet.proxy.tokens import Tokens
from fleet.standin.process import Standin

USER = {"role": "user", "content": "What now?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


pieces = st.sampled_from([*SPECIAL, "<|eats|>", " ", "  \n", "a", "fleet", "<|im", "é"])


@settings(deadline=None)
@given(st.lists(pieces, max_size=30).map("".join), st.booleans())
def test_ids_put_together_are_those_of_the_whole_text(
    tokenizer: Tokenizer, text: str, special: bool
) -> None:
    whole = tokenizer._own.encode(text, add_special_tokens=special)
    assert msgspec.json.decode(tokenizer._text_ids(text, special)) == whole


def test_a_turn_costs_its_new_text(tokenizer: Tokenizer) -> None:
    talk, encoded = [], []
    kept = tokenizer._backend
    told = SimpleNamespace(
        encode=lambda text, **how: encoded.append(text) or kept.encode(text, **how)
    )
    tokenizer._backend = told
    try:
        for turn in range(5):
            talk.append({"role": "user", "content": f"turn {turn} " * 50})
            ours(tokenizer, CHAT, {"messages": talk})
            new, encoded[:] = "".join(encoded), []
            talk.append({"role": "assistant", "content": "So."})
            assert f"turn {turn}" in new
            assert f"turn {turn - 1}" not in new
    finally:
        tokenizer._backend = kept


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
FILE = {"type": "image", "source": {"type": "url", "url": "http://h/a.png"}}
UNKNOWN = {
    "multi-modal": [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [FILE]}]}),
    ],
    "previous response": [(RESPONSES, {"input": "?", "previous_response_id": "r"})],
    "truncation or template of the request": [
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 4}),
        (CHAT, {"messages": [USER], "chat_template": CHATML}),
        (RESPONSES, {"input": "?", "truncation": "auto"}),
    ],
    "malformed": [
        (CHAT, {"messages": [{"content": "no role"}]}),
        (CHAT, {"messages": 5}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"text": "?"}]}]}),
        (RESPONSES, {"input": []}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
    ],
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_cannot_be_told_is_said_and_raises_nothing_else(
    reason: str, tokenizer: Tokenizer
) -> None:
    for path, asked in UNKNOWN[reason]:
        with pytest.raises(Unknown, match=f"^{reason}$"):
            ours(tokenizer, path, asked)


def test_without_a_template_only_text_has_ids(tmp_path: Path) -> None:
    bare = Tokenizer(str(tiny_model(tmp_path, template=None)))
    assert ours(bare, COMPLETIONS, {"prompt": "a"})
    with pytest.raises(Unknown, match="no chat template"):
        ours(bare, CHAT, {"messages": [USER]})


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json there"):
        Tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=f"--tokenizer {tmp_path}"):
        Tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(TokenizerError, match="leave the option out"):
        Tokenizer(str(tmp_path))


LONG = {"messages": [{"role": "user", "content": "one two three " * 300}]}


def test_a_body_gets_its_ids_or_the_reason_is_counted(tokenizer: Tokenizer) -> None:
    tokens = Tokens(tokenizer)

    def found(path: str, asked: dict[str, Any]) -> Body:
        body = Body(json.dumps({"model": "m", **asked}).encode(), APIS[path])
        asyncio.run(tokens.find(body))
        return body

    chat, ids = found(CHAT, LONG), ours(tokenizer, CHAT, LONG)
    assert (chat.form, chat.has_ids, chat.prompt_tokens) == ("chat", True, len(ids))
    as_ids = json.dumps(ids, separators=(",", ":"))
    same = Body(f'{{"model": "m", "prompt": {as_ids}}}'.encode(), APIS[COMPLETIONS])
    assert chat.keys()
    assert chat.keys() == same.keys()
    assert b"one two three" in chat.raw
    for prompt in ([1], ["a", "b"]):
        assert found(COMPLETIONS, {"prompt": prompt}).has_ids == (prompt == [1])
    found(CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]})
    assert tokens.unknown == {"several prompts": 1, "multi-modal": 1}


@pytest.mark.slow
def test_the_proxy_tokenizes_what_it_sends_on_as_it_came(
    started: list[Standin], tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    options = ("--tokenizer", str(folder))
    with proxy(tmp_path, named(started), "linear", *options) as on:
        asked = {"model": "null", "max_tokens": 1, **LONG}
        ids = ours(tokenizer, CHAT, LONG)
        as_ids = {"model": "null", "max_tokens": 1, "prompt": ids}
        compact = json.dumps(as_ids, separators=(",", ":")).encode()
        assert post(on.url, compact, X_Request_Id="ids").status == 200
        assert post(on.url, asked, CHAT, X_Request_Id="chat").status == 200
        on.end("chat")
        first, second = on.lines("decision")
        assert second["prompt_tokens"] == len(ids)
        # The chat has the prefix that the same ids had: they share what is cached.
        assert second["instance"] == first["instance"]
        cached = [one["cached_tokens"] for one in second["snapshot"]["candidates"]]
        assert max(cached) > len(ids) // 2
        image = {"model": "null", "messages": [{"role": "user", "content": [IMAGE]}]}
        assert post(on.url, image, CHAT).status == 200
        counted = b'kvtax_proxy_untokenized_total{reason="multi-modal"} 1.0'
        assert counted in on.get("/metrics").body
