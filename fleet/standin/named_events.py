# SPDX-License-Identifier: Apache-2.0
"""The bytes of answers whose events have names: /v1/messages and /v1/responses.

In the order of vLLM 0.18.1 (entrypoints/anthropic/serving.py, and
entrypoints/openai/responses/serving.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleet.standin.answers import DONE, TEXT, Counts, event
from fleet.standin.asks import Ask


class MessagesAnswer:
    """fleet.standin.answers.Answer, as Anthropic's API has it."""

    def __init__(self, ask: Ask, id_: str) -> None:
        self._head = {"id": id_, "type": "message", "role": "assistant"}
        self._head |= {"model": ask.model, "stop_reason": None, "stop_sequence": None}
        self._begun = self._opened = False

    def opening(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._head, "content": [], "usage": usage}
        return event({"type": "message_start", "message": message})

    def tokens(self, count: int, *, last: bool) -> bytes:
        delta = {"type": "text_delta", "text": TEXT}
        one = event({"type": "content_block_delta", "index": 0, "delta": delta})
        return self.opening() + self._block() + one * count

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

    def _block(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        block = {"type": "text", "text": ""}
        return event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )


class ResponsesAnswer:
    """fleet.standin.answers.Answer, as OpenAI's Responses API has it."""

    def __init__(self, ask: Ask, id_: str) -> None:
        self._head = {"id": id_, "object": "response", "created_at": 0}
        self._head |= {"model": ask.model, "tools": [], "tool_choice": "auto"}
        self._head |= {"parallel_tool_calls": True}
        self._where = {"item_id": f"msg_{id_}", "output_index": 0, "content_index": 0}
        self._number = 0
        self._begun = self._opened = False

    def opening(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        begun = {**self._head, "status": "in_progress", "output": []}
        names = "response.created", "response.in_progress"
        return b"".join(self._event(name, response=begun) for name in names)

    def tokens(self, count: int, *, last: bool) -> bytes:
        begun = self.opening() + self._item()
        name, more = "response.output_text.delta", {"delta": TEXT, "logprobs": []}
        return begun + b"".join(
            self._event(name, **self._where, **more) for _ in range(count)
        )

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

    def _item(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        item = {**self._message(0), "status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": []}
        name = "response.content_part.added"
        return added + self._event(name, **self._where, part=part)

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
