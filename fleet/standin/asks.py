# SPDX-License-Identifier: Apache-2.0
"""Reading a request body: what is asked for, or why it cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

# Text has no tokenizer here: this many bytes of UTF-8 are one token.
BYTES_PER_TOKEN = 4


class BadAsk(ValueError):
    """The request cannot be served; `status` is the HTTP status vLLM answers with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Ask(msgspec.Struct):
    """The fields that decide the answer, of all APIs."""

    model: str
    prompt: Any = None  # a text, token ids, or a list of one of them
    messages: list[dict[str, Any]] | None = None
    system: Any = None
    input: Any = None
    instructions: str | None = None
    tools: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int:
        limits = self.max_completion_tokens, self.max_output_tokens, self.max_tokens
        return next((asked for asked in limits if asked is not None), 16)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_decode = msgspec.json.Decoder(Ask).decode


def read_ask(
    body: bytes, *, path: str, model: str, max_model_len: int
) -> tuple[Ask, np.ndarray]:
    """The ask to the API at `path`, and its prompt as int32 ids. Raises BadAsk."""
    try:
        ask = _decode(body)
    except msgspec.DecodeError as error:
        raise BadAsk(f"body: {error}") from error
    if ask.model != model:
        raise BadAsk(f"The model `{ask.model}` does not exist.", 404)
    if path == "/v1/completions":
        tokens = _tokens(ask.prompt)
    else:
        turns = ask.input if path == "/v1/responses" else ask.messages
        tokens = _text_tokens(_render(ask, turns))
    if not len(tokens):
        raise BadAsk("the prompt is empty")
    if ask.output_tokens < 1:
        raise BadAsk("max_tokens must be at least 1")
    if len(tokens) + ask.output_tokens > max_model_len:
        raise BadAsk(
            f"This model's maximum context length is {max_model_len} tokens; asked for "
            f"{len(tokens)} in the prompt and {ask.output_tokens} in the answer."
        )
    return ask, tokens


def _tokens(prompt: Any) -> np.ndarray:
    if isinstance(prompt, list) and len(prompt) == 1:
        (only,) = prompt
        prompt = prompt if isinstance(only, int) else only
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    try:
        tokens = np.asarray(prompt, np.int32)
    except (TypeError, ValueError, OverflowError):
        tokens = None
    if tokens is None or tokens.ndim != 1:
        raise BadAsk("prompt: one text or one list of token ids expected")
    return tokens


def _render(ask: Ask, turns: Any) -> str:
    if not turns:
        raise BadAsk("messages: at least one expected")
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    head = [f"{one}\n" for one in (ask.tools, ask.system, ask.instructions) if one]
    said = [f"<|{turn.get('role')}|>{turn.get('content')}\n" for turn in turns]
    return "".join(head + said)


def _text_tokens(text: str) -> np.ndarray:
    data = text.encode()
    return np.frombuffer(data + bytes(-len(data) % BYTES_PER_TOKEN), np.int32)
