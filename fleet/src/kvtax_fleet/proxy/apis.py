# SPDX-License-Identifier: Apache-2.0
"""The APIs that vLLM serves: the fields of their prompts, the events of their streams.

Streams are searched as bytes. A line break inside JSON is escaped, so that a mark after
a real line break cannot be part of generated text.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

# Exceptions of decoders: UnicodeDecodeError and DecodeError are ValueErrors, too.
UNREADABLE = (ValueError, RecursionError)

# An "opening" comes before all tokens, also where no token follows.
Kind = Literal["opening", "token", "error", "end"]
_DATA, _EVENT = b"data:", b"event:"


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] = {}
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The fields by which a chunk without a token differs from one with a token."""

    choices: list[_Choice] | None = None
    usage: dict[str, msgspec.Raw] | None = None
    error: msgspec.Raw | None = None


class _Result(msgspec.Struct):
    """The fields by which a result in JSON differs from an error."""

    choices: list[_Choice] | None = None
    content: list[msgspec.Raw] | None = None
    output: list[msgspec.Raw] | None = None
    error: msgspec.Raw | None = None


class _Usage(msgspec.Struct):
    output_tokens: int = -1


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Last(msgspec.Struct):
    """An event with the token counts: Anthropic's, or OpenAI's in its `response`."""

    usage: _Usage | None = None
    response: _Response | None = None


_decode_result = msgspec.json.Decoder(_Result).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_last = msgspec.json.Decoder(_Last).decode
# Bytes after the last line of a stream's event.
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_EMPTY = (b'""', b"null", b"[]", b"{}")
# A choice without text that ends so has been given up by the engine.
_GIVEN_UP = ("abort", "error")
_BEGINS_AS_ERROR = re.compile(rb'\s*\{\s*("error"|"detail"|"object"\s*:\s*"error")')


def with_lf(events: bytes) -> bytes:
    """Return events with LF for CRLF and CR, which end lines, too.

    A CR at the end is left out: the LF of a CRLF may follow.
    """
    if b"\r" not in events:
        return events
    whole = events.removesuffix(b"\r")
    return whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _marks(*lines: bytes) -> tuple[bytes, ...]:
    """Return beginnings of lines, with and without a blank after the colon."""
    return tuple(
        b"\n" + line.replace(b":", colon, 1)
        for line in lines
        for colon in (b": ", b":")
    )


class Api(msgspec.Struct, frozen=True):
    """One of vLLM's APIs, whose events are `data: JSON`.

    `prompt`: the fields that make up the prompt, in the order in which chat templates
    commonly write them. `transfers`: whether the API takes `kv_transfer_params`.
    `errors`, `ends`, `token`: how a stream marks an error, the end, a token.
    """

    path: str
    prompt: tuple[str, ...]
    transfers: bool = True
    errors: re.Pattern[bytes] = re.compile(rb'\ndata:[ \t]*\{\s*"error"\s*:\s*[{"]')
    ends: tuple[bytes, ...] = _marks(b"data:[DONE]")
    token: bytes = b"}\n\n"

    def kind(self, event: bytes) -> Kind:
        """Classify a whole event at the beginning of a stream."""
        line = b"\n" + event
        if self.errors.match(line):
            return "error"
        if line.startswith(self.ends):
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


class NamedEvents(Api, frozen=True):
    """An API whose events are `event: NAME` and `data: JSON`."""

    openings: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def kind(self, event: bytes) -> Kind:
        first, _, data = event.partition(b"\n")
        if self.errors.match(b"\n" + first) or first.startswith(_DATA):
            return "error"
        if not first.startswith(_EVENT):
            return "opening"
        name = first.removeprefix(_EVENT).decode(errors="replace").strip()
        if name in self.openings:
            return "opening"
        return "end" if name in self.last and _counts_none(data) else "token"


def _has_role_only(delta: dict[str, msgspec.Raw]) -> bool:
    others = (bytes(value) for name, value in delta.items() if name != "role")
    return "role" in delta and all(value in _EMPTY for value in others)


def is_result(begin: bytes, is_whole: bool) -> bool:
    """Return whether an answer in JSON has a result, as far as its beginning shows.

    What stands before an instance may answer for it, with a page or an error of its
    own, whatever the status.
    """
    if not is_whole:
        return begin.lstrip()[:1] == b"{" and not _BEGINS_AS_ERROR.match(begin)
    try:
        result = _decode_result(begin)
    except UNREADABLE:
        return False
    if not _is_null(result.error):
        return False
    if result.choices is not None:
        return not all(map(_is_given_up, result.choices))
    return result.content is not None or result.output is not None


def _is_null(field: msgspec.Raw | None) -> bool:
    return field is None or bytes(field) == b"null"


def _is_given_up(choice: _Choice) -> bool:
    has_text = choice.text or any(
        bytes(value) not in _EMPTY
        for name, value in choice.delta.items()
        if name != "role"
    )
    return choice.finish_reason in _GIVEN_UP and not has_text


def _counts_none(data: bytes) -> bool:
    try:
        last = _decode_last(data.removeprefix(_DATA))
    except UNREADABLE:
        return False
    usage = last.usage or (last.response.usage if last.response else None)
    return usage is not None and usage.output_tokens == 0


_ERROR, _FAILED = b"event:error", b"event:response.failed"

APIS = {
    api.path: api
    for api in (
        Api(COMPLETIONS, ("prompt",)),
        Api(CHAT, ("tools", "messages")),
        NamedEvents(
            MESSAGES,
            ("tools", "system", "messages"),
            transfers=False,
            errors=re.compile(rb"\nevent: ?error"),
            ends=_marks(b"event:message_stop", _ERROR),
            token=b"content_block_delta\n",
            openings=("message_start", "ping"),
            last=("message_delta",),
        ),
        NamedEvents(
            RESPONSES,
            ("tools", "instructions", "input"),
            transfers=False,
            errors=re.compile(rb"\nevent: ?(error|response\.failed)"),
            ends=_marks(
                b"event:response.completed",
                b"event:response.incomplete",
                _ERROR,
                _FAILED,
            ),
            token=b".delta\n",
            openings=("response.created", "response.in_progress", "response.queued"),
            last=("response.completed", "response.incomplete"),
        ),
    )
}
