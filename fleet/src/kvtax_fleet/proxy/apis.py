# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions and chat as vLLM serves them: prompts, and events of a stream.

Streams are searched as bytes. A line break inside JSON is escaped, so that a mark after
a real line break cannot be part of generated text.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Exceptions of decoders: UnicodeDecodeError and DecodeError are ValueErrors, too.
UNREADABLE = (ValueError, RecursionError)
# An "opening" comes before all tokens, also where no token follows.
Kind = Literal["opening", "token", "error", "end"]
# Bytes after the last line of an event.
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
# How a stream marks its end, a token and an error, after LF for each line's end.
ENDS = (b"\ndata: [DONE]", b"\ndata:[DONE]")
TOKEN = b"}\n\n"
ERROR = re.compile(rb'\ndata:[ \t]*\{\s*"error"\s*:\s*[{"]')
_DATA = b"data:"
_EMPTY = (b'""', b"null", b"[]", b"{}")
# A choice without text that ends so has been given up by the engine.
_GIVEN_UP = ("abort", "error")


class Api(msgspec.Struct, frozen=True):
    """A served API; `prompt` are the fields that make up the prompt."""

    path: str
    prompt: tuple[str, ...]


APIS = {
    COMPLETIONS: Api(COMPLETIONS, ("prompt",)),
    CHAT: Api(CHAT, ("tools", "messages")),
}


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] = {}
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The fields by which chunks with a token, chunks without one and errors differ."""

    choices: list[_Choice] | None = None
    usage: dict[str, msgspec.Raw] | None = None
    error: msgspec.Raw | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def with_lf(events: bytes) -> bytes:
    """Return events with LF for CRLF and CR, which end lines, too.

    A CR at the end is left out: the LF of a CRLF may follow.
    """
    if b"\r" not in events:
        return events
    whole = events.removesuffix(b"\r")
    return whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def kind_of(event: bytes) -> Kind:
    """Classify a whole event at the beginning of a stream."""
    line = b"\n" + event
    if ERROR.match(line):
        return "error"
    if line.startswith(ENDS):
        return "end"
    if not event.startswith(_DATA):
        return "opening"  # a comment, as gateways send to stay connected
    try:
        chunk = _decode_chunk(event.removeprefix(_DATA))
    except UNREADABLE:
        return "error"
    if chunk.choices is None or not _is_null(chunk.error):
        return "error" if chunk.usage is None else "end"
    if not chunk.choices:
        # vLLM 0.18.1 answers so to a request whose KV could not be loaded.
        return "opening" if chunk.usage is None else "end"
    if all(map(_is_given_up, chunk.choices)):
        return "end"
    roles_only = all(_has_role_only(choice.delta) for choice in chunk.choices)
    return "opening" if roles_only else "token"


def is_result(answer: bytes) -> bool:
    """Return whether a whole answer in JSON has a result.

    A gateway before an instance may answer for it with a page or an error of its own,
    whatever the status.
    """
    try:
        result = _decode_chunk(answer)
    except UNREADABLE:
        return False
    if not _is_null(result.error) or result.choices is None:
        return False
    return not all(map(_is_given_up, result.choices))


def _has_role_only(delta: dict[str, msgspec.Raw]) -> bool:
    others = (bytes(value) for name, value in delta.items() if name != "role")
    return "role" in delta and all(value in _EMPTY for value in others)


def _is_null(field: msgspec.Raw | None) -> bool:
    return field is None or bytes(field) == b"null"


def _is_given_up(choice: _Choice) -> bool:
    has_text = choice.text or any(
        bytes(value) not in _EMPTY
        for name, value in choice.delta.items()
        if name != "role"
    )
    return choice.finish_reason in _GIVEN_UP and not has_text
