# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of the stand-in, byte for byte as vLLM reads and writes them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tests.harness.standin.standin_engine import OUTPUT_TOKEN, Ids

# Bytes of UTF-8 in a token of text: there is no tokenizer.
BYTES_PER_TOKEN = 4


class BadRequest(ValueError):
    """The request cannot be served; `status` is the HTTP status vLLM answers with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GenerateRequest(msgspec.Struct):
    """The fields that decide the answer, of both APIs."""

    model: str
    prompt: Any = None  # a text, token ids, or a list of one of them
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int:
        limits = self.max_completion_tokens, self.max_tokens
        return next((limit for limit in limits if limit is not None), 16)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_decode = msgspec.json.Decoder(GenerateRequest).decode


def read_request(
    body: bytes, *, path: str, model: str, max_model_len: int
) -> tuple[GenerateRequest, Ids]:
    """Read a request to the API at `path`, and its prompt. Raises BadRequest."""
    try:
        request = _decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"body: {error}") from error
    if request.model != model:
        raise BadRequest(f"The model `{request.model}` does not exist.", 404)
    if path == "/v1/completions":
        tokens = _tokens(request.prompt)
    else:
        tokens = _text_tokens(_render(request))
    if not len(tokens):
        raise BadRequest("the prompt is empty")
    if request.output_tokens < 1:
        raise BadRequest("max_tokens must be at least 1")
    if len(tokens) + request.output_tokens > max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens; requested "
            f"{len(tokens)} in the prompt and {request.output_tokens} in the answer."
        )
    return request, tokens


def _tokens(prompt: Any) -> Ids:
    if isinstance(prompt, list) and len(prompt) == 1:
        (only,) = prompt
        prompt = prompt if isinstance(only, int) else only
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    try:
        tokens = np.asarray(prompt, np.int32)
    except (TypeError, ValueError, OverflowError):
        tokens = np.empty((0, 0), np.int32)
    if tokens.ndim != 1:
        raise BadRequest("prompt: one text or one list of token ids expected")
    return tokens


def _render(request: GenerateRequest) -> str:
    if not request.messages:
        raise BadRequest("messages: at least one expected")
    tools = f"{request.tools}\n" if request.tools else ""
    turns = (
        f"<|{turn.get('role')}|>{turn.get('content')}\n" for turn in request.messages
    )
    return tools + "".join(turns)


def _text_tokens(text: str) -> Ids:
    data = text.encode()
    return np.frombuffer(data + bytes(-len(data) % BYTES_PER_TOKEN), np.int32)


DONE = b"data: [DONE]\n\n"
TEXT = " a"


class Counts(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt: int
    cached: int | None
    """None: the server does not report them."""
    made: int

    def openai(self) -> dict[str, Any]:
        """Return the counts of vLLM's --enable-prompt-tokens-details."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.made,
            "completion_tokens": self.made,
        }
        if self.cached is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return counts


class Answer:
    """An answer of completions or of chat: the events of a stream, or one body."""

    def __init__(self, request: GenerateRequest, id_: str, *, chat: bool) -> None:
        self.model = request.model
        self.id = id_
        self._begun = False
        self._with_ids = request.return_token_ids
        self._chat = chat
        self._token = self._chunk(None)

    def opening(self) -> bytes:
        """Return the bytes before the first token, once."""
        begun, self._begun = self._begun, True
        return b"" if begun or not self._chat else self._role()

    def tokens(self, count: int, *, last: bool) -> bytes:
        """Encode `count` events of one token; the last one has the finish reason."""
        end = self._token if not last else self._chunk("length")
        return self.opening() + self._token * (count - 1) + end * (count > 0)

    def end(self, counts: Counts, *, usage: bool) -> bytes:
        """Encode the stream's end, with the token counts if `usage`."""
        if not usage:
            return DONE
        return event(self._head("") | {"choices": [], "usage": counts.openai()}) + DONE

    def error(self, message: str) -> bytes:
        """Encode an error inside a stream that began with status 200, and the end."""
        return event(error_body(message, 500)) + DONE

    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
        """Encode a whole answer that is not streamed."""
        text, ids = TEXT * counts.made, [OUTPUT_TOKEN] * counts.made
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids}
        message = {"role": "assistant", "content": text}
        content = {"message": message} if self._chat else {"text": text}
        return msgspec.json.encode(
            self._head("")
            | {"choices": [choice | content], "usage": counts.openai()}
            | {"kv_transfer_params": transfer}
        )

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": 0, "model": self.model}

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return event(self._head(".chunk") | {"choices": [choice]})

    def _chunk(self, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice |= {"delta": {"content": TEXT}} if self._chat else {"text": TEXT}
        if self._with_ids:
            choice["token_ids"] = [OUTPUT_TOKEN]
        return event(self._head(".chunk") | {"choices": [choice], "usage": None})


def error_body(message: str, status: int) -> dict[str, Any]:
    """Return vLLM's error body."""
    kind, param = "InternalServerError" if status >= 500 else "BadRequestError", None
    if status == 404:  # of the model
        kind, param = "NotFoundError", "model"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def event(content: dict[str, Any]) -> bytes:
    """Encode an event of a stream."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
