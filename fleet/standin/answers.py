# SPDX-License-Identifier: Apache-2.0
"""The bytes of an answer to a completion or a chat, as vLLM writes them."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from fleet.standin.asks import Ask
from fleet.standin.engine import OUTPUT_TOKEN

DONE = b"data: [DONE]\n\n"
TEXT = " a"


class Counts(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt: int
    cached: int
    made: int

    def openai(self) -> dict[str, Any]:
        """As with vLLM's --enable-prompt-tokens-details."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.made,
            "completion_tokens": self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(Protocol):
    """The chunks of one streamed answer, or the one body of another."""

    def opening(self) -> bytes:
        """What comes before the first token, once."""

    def tokens(self, count: int, *, last: bool) -> bytes:
        """`count` events of one token each; the last one says why it stopped."""

    def end(self, counts: Counts, *, usage: bool) -> bytes:
        """The stream's end. `usage`: with the token counts, where that is a choice."""

    def error(self, message: str) -> bytes:
        """An error inside a stream that began with status 200, and the end."""

    def body(self, counts: Counts, transfer: dict[str, Any] | None) -> bytes:
        """A whole answer that is not streamed."""


class CompletionAnswer:
    """Of /v1/completions and /v1/chat/completions."""

    def __init__(self, ask: Ask, id_: str, *, chat: bool) -> None:
        self._ask = ask
        self._id = id_
        self._chat = chat
        self._token = self._chunk(None)
        self._opening = self._role() if chat else b""

    def opening(self) -> bytes:
        opening, self._opening = self._opening, b""
        return opening

    def tokens(self, count: int, *, last: bool) -> bytes:
        if not last:
            return self.opening() + self._token * count
        return self.opening() + self._token * (count - 1) + self._chunk("length")

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
        said = {"message": message} if self._chat else {"text": text}
        return msgspec.json.encode(
            self._head("")
            | {"choices": [choice | said], "usage": counts.openai()}
            | {"kv_transfer_params": transfer}
        )

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": 0, "model": self._ask.model}

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return event(self._head(".chunk") | {"choices": [choice]})

    def _chunk(self, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice |= {"delta": {"content": TEXT}} if self._chat else {"text": TEXT}
        if self._ask.return_token_ids:
            choice["token_ids"] = [OUTPUT_TOKEN]
        return event(self._head(".chunk") | {"choices": [choice], "usage": None})


def error_body(message: str, status: int) -> dict[str, Any]:
    """What vLLM sends where it cannot answer."""
    kind = "InternalServerError" if status >= 500 else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def event(content: dict[str, Any]) -> bytes:
    """An event of a stream; one that says its `type` is named after it."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: ".encode() + msgspec.json.encode(content) + b"\n\n"
