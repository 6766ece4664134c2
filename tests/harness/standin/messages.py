# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of the stand-in, byte for byte as vLLM reads and writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        turns = request.input if path == "/v1/responses" else request.messages
        tokens = _text_tokens(_render(request, turns))
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


def _render(request: GenerateRequest, turns: Any) -> str:
    if not turns:
        raise BadRequest("messages: at least one expected")
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    head = [
        f"{one}\n"
        for one in (request.tools, request.system, request.instructions)
        if one
    ]
    texts = [f"<|{turn.get('role')}|>{turn.get('content')}\n" for turn in turns]
    return "".join(head + texts)


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


class Answer(ABC):
    """The pieces of one streamed answer, or the one body of another."""

    def __init__(self, request: GenerateRequest, id_: str) -> None:
        self.model = request.model
        self.id = id_
        self._begun = self._opened = False

    def opening(self) -> bytes:
        """Return the bytes before the first token, once."""
        begun, self._begun = self._begun, True
        return b"" if begun else self._begin()

    def tokens(self, count: int, *, last: bool) -> bytes:
        """Encode `count` events of one token; the last one has the finish reason."""
        begun, opened = self.opening(), self._opened
        self._opened = True
        return begun + (b"" if opened else self._open()) + self._tokens(count, last)

    @abstractmethod
    def end(self, counts: Counts, *, usage: bool) -> bytes:
        """Encode the stream's end; `usage`: with the token counts, if optional."""

    @abstractmethod
    def error(self, message: str) -> bytes:
        """Encode an error inside a stream that began with status 200, and the end."""

    @abstractmethod
    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
        """Encode a whole answer that is not streamed."""

    def _begin(self) -> bytes:
        return b""

    def _open(self) -> bytes:
        """Encode what comes before the first token's event."""
        return b""

    @abstractmethod
    def _tokens(self, count: int, last: bool) -> bytes: ...


class CompletionAnswer(Answer):
    """An answer of /v1/completions or /v1/chat/completions."""

    def __init__(self, request: GenerateRequest, id_: str, *, chat: bool) -> None:
        super().__init__(request, id_)
        self._with_ids = request.return_token_ids
        self._chat = chat
        self._token = self._chunk(None)

    def end(self, counts: Counts, *, usage: bool) -> bytes:
        if not usage:
            return DONE
        return event(self._head("") | {"choices": [], "usage": counts.openai()}) + DONE

    def error(self, message: str) -> bytes:
        return event(error_body(message, 500)) + DONE

    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
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

    def _begin(self) -> bytes:
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return event(self._head(".chunk") | {"choices": [choice]})

    def _tokens(self, count: int, last: bool) -> bytes:
        if not last:
            return self._token * count
        return self._token * (count - 1) + self._chunk("length")

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
    """Encode an event of a stream, named by its `type` if it has one."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: ".encode() + msgspec.json.encode(content) + b"\n\n"


class MessagesAnswer(Answer):
    """An answer of /v1/messages, in the order of vLLM 0.18.1 (anthropic/serving.py)."""

    @property
    def _head(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant"}
        return head | {"model": self.model, "stop_reason": None, "stop_sequence": None}

    def _begin(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._head, "content": [], "usage": usage}
        return event({"type": "message_start", "message": message})

    def _open(self) -> bytes:
        block = {"type": "text", "text": ""}
        return event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def _tokens(self, count: int, last: bool) -> bytes:
        delta = {"type": "text_delta", "text": TEXT}
        return count * event(
            {"type": "content_block_delta", "index": 0, "delta": delta}
        )

    def end(self, counts: Counts, *, usage: bool) -> bytes:
        stopped = event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": "max_tokens"}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(counts)}
        closed = stopped if self._opened else b""
        return closed + event(last) + event({"type": "message_stop"}) + DONE

    def error(self, message: str) -> bytes:
        return event(anthropic_error(message, "internal_error")) + DONE

    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
        content = [{"type": "text", "text": TEXT * counts.made}]
        more = {"content": content, "usage": _usage(counts)}
        return msgspec.json.encode({**self._head, **more, "stop_reason": "max_tokens"})


class ResponsesAnswer(Answer):
    """An answer of /v1/responses, in vLLM 0.18.1's order (responses/serving.py)."""

    def __init__(self, request: GenerateRequest, id_: str) -> None:
        super().__init__(request, id_)
        self._head: dict[str, Any] = {"id": id_, "object": "response", "created_at": 0}
        self._head |= {"model": request.model, "tools": [], "tool_choice": "auto"}
        self._head |= {"parallel_tool_calls": True}
        self._where: dict[str, Any] = {
            "item_id": f"msg_{id_}",
            "output_index": 0,
            "content_index": 0,
        }
        self._number = 0

    def _begin(self) -> bytes:
        begun = {**self._head, "status": "in_progress", "output": []}
        names = "response.created", "response.in_progress"
        return b"".join(self._event(name, response=begun) for name in names)

    def _open(self) -> bytes:
        item = {**self._message(0), "status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": []}
        return added + self._event(
            "response.content_part.added", **self._where, part=part
        )

    def _tokens(self, count: int, last: bool) -> bytes:
        name, more = "response.output_text.delta", {"delta": TEXT, "logprobs": []}
        return b"".join(self._event(name, **self._where, **more) for _ in range(count))

    def end(self, counts: Counts, *, usage: bool) -> bytes:
        done = b""
        if self._opened:
            text = {"text": TEXT * counts.made, "logprobs": []}
            done = self._event("response.output_text.done", **self._where, **text)
            item = self._message(counts.made)
            done += self._event("response.output_item.done", output_index=0, item=item)
        return done + self._event("response.completed", response=self._whole(counts))

    def error(self, message: str) -> bytes:
        return self._event("error", message=message, code="500", param=None)

    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
        return msgspec.json.encode(self._whole(counts))

    def _whole(self, counts: Counts) -> dict[str, Any]:
        usage = _usage(counts) | {"total_tokens": counts.prompt + counts.made}
        usage |= {"input_tokens_details": {"cached_tokens": counts.cached}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
        output = [self._message(counts.made)] if counts.made else []
        more = {"status": "completed", "output": output, "usage": usage}
        return {**self._head, **more}

    def _message(self, tokens: int) -> dict[str, Any]:
        text = {"type": "output_text", "text": TEXT * tokens, "annotations": []}
        item = {"id": self._where["item_id"], "type": "message", "role": "assistant"}
        return {**item, "status": "completed", "content": [text]}

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **fields})


def anthropic_error(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _usage(counts: Counts) -> dict[str, Any]:
    return {"input_tokens": counts.prompt, "output_tokens": counts.made}
