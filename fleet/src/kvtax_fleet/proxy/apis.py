# SPDX-License-Identifier: Apache-2.0
"""The APIs that vLLM serves: the fields of their prompts, the events of their streams.

Streams are searched as bytes. A line break inside JSON is escaped, so that a mark after
a real line break cannot be part of generated text.
"""

from __future__ import annotations

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


class _Chunk(msgspec.Struct):
    """The fields by which a chunk without a token differs from one with a token."""

    choices: list[_Choice] = []
    usage: dict[str, msgspec.Raw] | None = None


class _Usage(msgspec.Struct):
    output_tokens: int = -1


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Last(msgspec.Struct):
    """An event with the token counts: Anthropic's, or OpenAI's in its `response`."""

    usage: _Usage | None = None
    response: _Response | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_last = msgspec.json.Decoder(_Last).decode
# Bytes after the last line of a stream's event.
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_EMPTY = (b'""', b"null", b"[]", b"{}")


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
    `errors`, `ends`, `token`: bytes of a stream that mark an error, the end, a token.
    """

    path: str
    prompt: tuple[str, ...]
    transfers: bool = True
    errors: tuple[bytes, ...] = _marks(b'data:{"error"')
    ends: tuple[bytes, ...] = _marks(b"data:[DONE]")
    token: bytes = b"}\n\n"

    def kind(self, event: bytes) -> Kind:
        """Classify an event at the beginning of a stream.

        An event that cannot be read counts as a token: the client has to read it.
        """
        line = b"\n" + event
        if line.startswith(self.errors):
            return "error"
        if line.startswith(self.ends):
            return "end"
        try:
            chunk = _decode_chunk(event.removeprefix(_DATA))
        except UNREADABLE:
            return "token"
        if not chunk.choices:
            # vLLM 0.18.1 answers so to a request whose KV could not be loaded.
            return "token" if chunk.usage is None else "end"
        roles_only = all(_has_role_only(choice.delta) for choice in chunk.choices)
        return "opening" if roles_only else "token"


class NamedEvents(Api, frozen=True):
    """An API whose events are `event: NAME` and `data: JSON`."""

    openings: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def kind(self, event: bytes) -> Kind:
        first, _, data = event.partition(b"\n")
        if b"\n" + first in self.errors:
            return "error"
        name = first.removeprefix(_EVENT).decode(errors="replace").strip()
        if name in self.openings:
            return "opening"
        return "end" if name in self.last and _counts_none(data) else "token"


def _has_role_only(delta: dict[str, msgspec.Raw]) -> bool:
    others = (bytes(value) for name, value in delta.items() if name != "role")
    return "role" in delta and all(value in _EMPTY for value in others)


def _counts_none(data: bytes) -> bool:
    """Return whether the stream's last event counts no token."""
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
            errors=_marks(_ERROR),
            ends=_marks(b"event:message_stop", _ERROR),
            token=b"content_block_delta\n",
            openings=("message_start", "ping"),
            last=("message_delta",),
        ),
        NamedEvents(
            RESPONSES,
            ("tools", "instructions", "input"),
            transfers=False,
            errors=_marks(_ERROR, _FAILED),
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
