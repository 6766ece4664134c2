# SPDX-License-Identifier: Apache-2.0
"""The prompt of a logged body: what a model would read of it, in the same order.

Chat templates are not applied: what counts is that equal beginnings stay equal, and
that a conversation's next turn begins with the turn before.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from fleet.trace.blocks import Asked
from fleet.trace.log_fields import FieldError, Row

# Marks where a prompt may be cached; clients move it from turn to turn.
NOT_READ = frozenset({"cache_control"})
BINARY = frozenset({"data", "file_data"})
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


def asked_of(body: Row) -> Asked:
    """A chat's tools, system prompt and messages; a text; or token ids.

    Raises FieldError.
    """
    if (messages := body.get("messages")) is not None:
        return _chat(body, "messages", messages)
    if (prompt := body.get("prompt")) is not None:
        return _completion(prompt)
    return _chat(body, "input", body.get("input"))


def text_of(value: Any) -> str:
    """All text in a JSON value, in a fixed order, with the names of fields."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(text_of(one) for one in value)
    if not isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    if value.get("type") in _TEXT_TYPES:
        return text_of(value.get("text"))
    return "".join(
        f"\n{key} {_digest(field) if _is_binary(key, field) else text_of(field)}"
        for key, field in sorted(value.items())
        if key not in NOT_READ and field is not None
    )


def _chat(body: Row, name: str, messages: Any) -> list[str]:
    if isinstance(messages, str):
        messages = [messages]
    if not isinstance(messages, list) or not messages:
        raise FieldError(f"{name} is no list of messages")
    system = [body.get("tools"), body.get("system"), body.get("instructions")]
    beginning = [text_of(one) for one in system if one]
    return beginning + [text_of(message) for message in messages]


def _completion(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not _is_id(prompt[0]):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
        return prompt
    raise FieldError("prompt is neither one text nor one list of token ids")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _is_binary(key: str, value: Any) -> bool:
    """Images, sounds and files, which are not read as the text that they come in."""
    return isinstance(value, str) and (key in BINARY or value.startswith("data:"))


def _digest(data: str) -> str:
    return blake2b(data.encode(), digest_size=16).hexdigest()
