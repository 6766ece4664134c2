# SPDX-License-Identifier: Apache-2.0
"""Token ids of text and chats are those of vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fleet.tests.proxy.proxy_lab import named, post, proxy
from fleet.tests.proxy.tiny_model import CHATML, PARTS, SPECIAL, ours, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax_fleet.proxy import tokenizer as tokenizer_module
from kvtax_fleet.proxy.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.chats import Unknown
from kvtax_fleet.proxy.tokenizer import (
    LONG_BYTES,
    Tokenizer,
    TokenizerError,
    Tokens,
)

# Tokenizers of transformers: seconds of imports.
pytestmark = pytest.mark.slow

Ids = Callable[[str, dict[str, Any]], list[int]]
SCHEMA = {"properties": {"path": {"type": "string"}, "n": {"maximum": 1.0}}}
USER = {"role": "user", "content": "Read <|im_end|> a file, é 漢字 \u2028"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "/etc/é", "n": 1e3}'},
}
TALK = [
    {"role": "system", "content": "Be <|eats|> brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "# README\n"},
    {"role": "assistant", "content": "So.", "reasoning": "Hm.", "tool_calls": []},
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]},
]
TOOL = {"name": "read", "parameters": SCHEMA | {"type": "object"}}
TOOLS = [
    {"type": "function", "function": TOOL},
    {
        "function": {**TOOL, "strict": True, "description": "Reads ü."},
        "type": "function",
    },
]
CLAUDE_TALK = [
    {"role": "user", "content": "Read it."},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "I read."},
            {"type": "tool_use", "id": "t1", "name": "read", "input": {"n": [1, 2.5]}},
            {"type": "tool_use", "id": "t2", "name": "ls", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "text"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": t} for t in ("x", "y")],
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "Go on."},
        ],
    },
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
]
CODEX_TALK = [
    {"role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "?"}],
    },
    {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": "H"}],
    },
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"n": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "text"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "So.", "annotations": []}],
    },
    {"role": "user", "content": "And?"},
]

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "a <|im|>b  <|eats|> c"}),
    "text, bare": (COMPLETIONS, {"prompt": "a", "add_special_tokens": False}),
    "chat": (CHAT, {"messages": [USER]}),
    "chat, talk": (CHAT, {"messages": TALK}),
    "chat, tools": (CHAT, {"messages": TALK, "tools": TOOLS}),
    "chat, no choice": (
        CHAT,
        {"messages": TALK, "tools": TOOLS, "tool_choice": "none"},
    ),
    "chat, options": (
        CHAT,
        {
            "messages": [USER],
            "chat_template_kwargs": {"thinking": False, "unused": 1},
            "reasoning_effort": "low",
            "add_special_tokens": True,
        },
    ),
    "chat, goes on": (
        CHAT,
        {
            "messages": [USER, {"role": "assistant", "content": "So I"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "messages": (MESSAGES, {"messages": [USER], "max_tokens": 1}),
    "messages, talk": (
        MESSAGES,
        {
            "messages": CLAUDE_TALK,
            "max_tokens": 1,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "You are Claude Code."},
                {"type": "text", "text": "Be brief."},
            ],
            "tools": [
                {"name": "read", "input_schema": SCHEMA, "description": "Reads."},
                {"name": "ls", "input_schema": {"type": "object"}},
            ],
        },
    ),
    "responses": (RESPONSES, {"input": "What now?"}),
    "responses, talk": (
        RESPONSES,
        {
            "input": CODEX_TALK,
            "instructions": "You are Codex.",
            "reasoning": {"effort": "high"},
            "tools": [{"type": "function", "strict": True, **TOOL}],
        },
    ),
    "responses, no choice": (
        RESPONSES,
        {
            "input": "?",
            "tools": [{"type": "function", "strict": True, **TOOL}],
            "tool_choice": "none",
        },
    ),
}


@contextmanager
def vllms(folder: Path) -> Iterator[Ids]:
    """What vLLM 0.18.1 renders, by the functions that its server calls."""
    from vllm.config import ModelConfig
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.serve.render.serving import OpenAIServingRender
    from vllm.renderers.hf import HfRenderer
    from vllm.tokenizers import cached_tokenizer_from_config

    model = ModelConfig(model=str(folder), dtype="float32")
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(_api_process_rank=0)
    )
    renderer = HfRenderer(config, cached_tokenizer_from_config(model))
    render = OpenAIServingRender(
        model,
        renderer,
        None,
        None,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    responses = OpenAIServingResponses.__new__(OpenAIServingResponses)
    responses.renderer, responses.model_config = renderer, model
    responses.chat_template, responses.chat_template_content_format = None, "auto"
    responses.parser, responses.msg_store = None, {}

    async def prompts(path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        raw = json.dumps({"model": "m", **asked})
        if path == COMPLETIONS:
            request = CompletionRequest.model_validate_json(raw)
            return await render.render_completion(request)
        if path == RESPONSES:
            request = ResponsesRequest.model_validate_json(raw)
            return (await responses._make_request(request, None))[1]
        if path == MESSAGES:
            request = AnthropicMessagesRequest.model_validate_json(raw)
            convert = AnthropicServingMessages._convert_anthropic_to_openai_request
            request = convert(request)
        else:
            request = ChatCompletionRequest.model_validate_json(raw)
        return (await render.render_chat(request))[1]

    with asyncio.Runner() as runner:

        def ids(path: str, asked: dict[str, Any]) -> list[int]:
            (prompt,) = runner.run(prompts(path, asked))
            return prompt["prompt_token_ids"]

        yield ids


@pytest.mark.parametrize("template", [CHATML, PARTS], ids=["text", "parts"])
def test_every_prompt_has_the_ids_that_vllm_makes_of_it(template, tmp_path):
    folder = tiny_model(tmp_path, template)
    own = Tokenizer(str(folder))
    with vllms(folder) as theirs:
        for name, (path, asked) in ASKED.items():
            expected = theirs(path, asked)
            assert ours(own, path, asked) == expected, name
            assert ours(own, path, asked) == expected, f"{name}, as it was kept"


USER_TURN = {"role": "user", "content": "What now?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


pieces = st.sampled_from([*SPECIAL, "<|eats|>", " ", "  \n", "a", "fleet", "<|im", "é"])


@settings(deadline=None)
@given(st.lists(pieces, max_size=30).map("".join), st.booleans())
def test_ids_put_together_are_those_of_the_whole_text(tokenizer, text, special):
    whole = tokenizer._own.encode(text, add_special_tokens=special)
    assert msgspec.json.decode(tokenizer._text_ids(text, special)) == whole


def test_a_turn_costs_its_new_text(tokenizer):
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
        (CHAT, {"messages": [USER_TURN], "chat_template": CHATML}),
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
def test_what_cannot_be_told_is_said_and_raises_nothing_else(reason, tokenizer):
    for path, asked in UNKNOWN[reason]:
        with pytest.raises(Unknown, match=f"^{reason}$"):
            ours(tokenizer, path, asked)


def test_without_a_template_only_text_has_ids(tmp_path):
    bare = Tokenizer(str(tiny_model(tmp_path, template=None)))
    assert ours(bare, COMPLETIONS, {"prompt": "a"})
    with pytest.raises(Unknown, match="no chat template"):
        ours(bare, CHAT, {"messages": [USER_TURN]})


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json there"):
        Tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=f"--tokenizer {tmp_path}"):
        Tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(TokenizerError, match="leave the option out"):
        Tokenizer(str(tmp_path))


LONG = {"messages": [{"role": "user", "content": "one two three " * 300}]}


def test_a_body_gets_its_ids_or_the_reason_is_counted(tokenizer):
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


def completion(prompt: str) -> Body:
    raw = json.dumps({"model": "m", "prompt": prompt}).encode()
    return Body(raw, APIS[COMPLETIONS])


async def test_long_prompts_hold_up_no_short_one_and_go_by_bytes_in_time(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "TIME_LIMIT_S", 0.2)
    done = threading.Event()

    def ids(path: str, fields: dict[str, Any]) -> bytes:
        if len(fields["prompt"]) >= LONG_BYTES:
            done.wait()
        return b"[1,2]"

    tokens = Tokens(SimpleNamespace(ids=ids, max_bytes=2**20))
    try:
        long = [completion("a" * LONG_BYTES) for _ in range(5)]
        waiting = [asyncio.ensure_future(tokens.find(body)) for body in long]
        await asyncio.sleep(0)
        short = completion("a")
        while not short.has_ids:  # also where this machine takes longer than the limit
            await tokens.find(short)
        await asyncio.gather(*waiting)
        assert not any(body.has_ids for body in long)
        assert tokens.unknown["too slow"] >= len(long)
    finally:
        done.set()


def test_a_prompt_beyond_the_model_is_not_tokenized(started, tmp_path, folder):
    options = ("--tokenizer", str(folder))
    text = "one two three " * (8 * 65536 // 14 + 1)
    with proxy(tmp_path, named(started), "linear", *options) as on:
        answer = post(on.url, {"model": "null", "max_tokens": 1, "prompt": text})
        assert answer.headers["X-Kvtax-Instance"] in "ab"
        counted = b'kvtax_proxy_untokenized_total{reason="too long"} 1.0'
        assert counted in on.get("/metrics").body


def test_the_proxy_tokenizes_what_it_sends_on_as_it_came(
    started, tmp_path, folder, tokenizer
):
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
