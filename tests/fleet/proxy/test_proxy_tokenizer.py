# SPDX-License-Identifier: Apache-2.0
"""The proxy makes the token ids of a request that vLLM itself makes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import CHATML, PARTS, ours, tiny_model

from fleet.proxy.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fleet.proxy.tokenizer import Tokenizer

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


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, PARTS], ids=["text", "parts"])
def test_every_prompt_has_the_ids_that_vllm_makes_of_it(
    template: str, tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path, template)
    own = Tokenizer(str(folder))
    with vllms(folder) as theirs:
        for name, (path, asked) in ASKED.items():
            expected = theirs(path, asked)
            assert ours(own, path, asked) == expected, name
            assert ours(own, path, asked) == expected, f"{name}, as it was kept"
