# SPDX-License-Identifier: Apache-2.0
"""The APIs that vLLM serves: where each has its prompt, and what its streams say.

Streams are looked at as bytes. A line break inside JSON is escaped, so that what is
looked for after a real one cannot be part of what the model says.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .top_level import UNREADABLE

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

# An event is an opening (it comes before all tokens, and also where none follows), has
# a token, is an error, or the end.
Kind = Literal["opening", "token", "error", "end"]
_DATA, _EVENT = b"data: ", b"event: "


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] = {}


class _Chunk(msgspec.Struct):
    """What tells chunks around the tokens from one with a token."""

    choices: list[_Choice] = []
    usage: dict[str, msgspec.Raw] | None = None


class _Usage(msgspec.Struct):
    output_tokens: int = -1


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _Last(_Counted):
    """An event with the token counts: Anthropic's, or OpenAI's in its `response`."""

    response: _Counted | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_last = msgspec.json.Decoder(_Last).decode
_EMPTY = (b'""', b"null", b"[]", b"{}")


class Api(msgspec.Struct, frozen=True):
    """One of vLLM's APIs, of which each event is `data: JSON`.

    `prompt`: the fields that make up the prompt, in the order in which chat templates
    commonly write them. `transfers`: whether `kv_transfer_params` are taken. `errors`,
    `ends`, `token`: what a stream has where there is an error, the end, or a token.
    """

    path: str
    prompt: tuple[str, ...]
    transfers: bool = True
    errors: tuple[bytes, ...] = (b'data: {"error"',)
    ends: tuple[bytes, ...] = (b"\ndata: [DONE]",)
    token: bytes = b"}\n\n"

    def kind(self, event: bytes) -> Kind:
        """What an event at the beginning of a stream is.

        "token" where it cannot be read: reading it is for the client to do.
        """
        if event.startswith(self.errors):
            return "error"
        if event.startswith(self.ends[0].lstrip()):
            return "end"
        try:
            chunk = _decode_chunk(event.removeprefix(_DATA))
        except UNREADABLE:
            return "token"
        if not chunk.choices:
            # So vLLM 0.18.1 answers a request whose KV could not be loaded.
            return "token" if chunk.usage is None else "end"
        roles_only = all(_names_role_only(one.delta) for one in chunk.choices)
        return "opening" if roles_only else "token"


class NamedEvents(Api, frozen=True):
    """An API whose events are `event: NAME` and `data: JSON`."""

    openings: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def kind(self, event: bytes) -> Kind:
        first, _, data = event.partition(b"\n")
        if b"\n" + first in self.errors:
            return "error"
        name = first.removeprefix(_EVENT).decode(errors="replace")
        if name in self.openings:
            return "opening"
        return "end" if name in self.last and _counts_none(data) else "token"


def _names_role_only(delta: dict[str, msgspec.Raw]) -> bool:
    others = (bytes(value) for name, value in delta.items() if name != "role")
    return "role" in delta and all(value in _EMPTY for value in others)


def _counts_none(data: bytes) -> bool:
    """Whether the stream's last event says that there was no token."""
    try:
        last = _decode_last(data.removeprefix(_DATA))
    except UNREADABLE:
        return False
    usage = last.usage or (last.response and last.response.usage)
    return usage is not None and usage.output_tokens == 0


_ERROR, _FAILED = b"\nevent: error", b"\nevent: response.failed"

APIS = {
    one.path: one
    for one in (
        Api(COMPLETIONS, ("prompt",)),
        Api(CHAT, ("tools", "messages")),
        NamedEvents(
            MESSAGES,
            ("tools", "system", "messages"),
            transfers=False,
            errors=(_ERROR,),
            ends=(b"\nevent: message_stop", _ERROR),
            token=b"content_block_delta\n",
            openings=("message_start", "ping"),
            last=("message_delta",),
        ),
        NamedEvents(
            RESPONSES,
            ("tools", "instructions", "input"),
            transfers=False,
            errors=(_ERROR, _FAILED),
            ends=(
                b"\nevent: response.completed",
                b"\nevent: response.incomplete",
                _ERROR,
                _FAILED,
            ),
            token=b".delta\n",
            openings=("response.created", "response.in_progress", "response.queued"),
            last=("response.completed", "response.incomplete"),
        ),
    )
}
