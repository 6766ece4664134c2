# SPDX-License-Identifier: Apache-2.0
"""The bytes of an answer, as vLLM writes them."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet.standin.asks import Ask
from fleet.standin.engine import OUTPUT_TOKEN

DONE = b"data: [DONE]\n\n"
TEXT = " a"


class Answer:
    """The chunks of one streamed answer, or the one body of another."""

    def __init__(self, ask: Ask, id_: str, *, chat: bool) -> None:
        self._ask = ask
        self._id = id_
        self._chat = chat
        self._token = self._chunk(None)
        self._opening = self._role() if chat else b""

    def opening(self) -> bytes:
        """What comes before the first token, once: a chat's event with the role."""
        opening, self._opening = self._opening, b""
        return opening

    def tokens(self, count: int, *, last: bool) -> bytes:
        """`count` events of one token each; the last one says why it stopped."""
        if not last:
            return self.opening() + self._token * count
        return self.opening() + self._token * (count - 1) + self._chunk("length")

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event with the token counts."""
        return _event(self._head("") | {"choices": [], "usage": usage})

    def body(self, usage: dict[str, Any], transfer: dict[str, Any] | None) -> bytes:
        """A whole answer that is not streamed."""
        tokens = usage["completion_tokens"]
        text, ids = TEXT * tokens, [OUTPUT_TOKEN] * tokens
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids}
        message = {"role": "assistant", "content": text}
        said = {"message": message} if self._chat else {"text": text}
        return msgspec.json.encode(
            self._head("")
            | {"choices": [choice | said], "usage": usage}
            | {"kv_transfer_params": transfer}
        )

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": 0, "model": self._ask.model}

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        return _event(self._head(".chunk") | {"choices": [choice]})

    def _chunk(self, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice |= {"delta": {"content": TEXT}} if self._chat else {"text": TEXT}
        if self._ask.return_token_ids:
            choice["token_ids"] = [OUTPUT_TOKEN]
        return _event(self._head(".chunk") | {"choices": [choice], "usage": None})


def usage(prompt_tokens: int, cached_tokens: int, made: int) -> dict[str, Any]:
    """Token counts, as with vLLM's --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + made,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(message: str, status: int) -> dict[str, Any]:
    """What vLLM sends where it cannot answer."""
    kind = "InternalServerError" if status >= 500 else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(message: str) -> bytes:
    """An error inside a stream that began with status 200."""
    return _event(error_body(message, 500))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
