# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of one completion, read without parsing every one of them.

Only the events up to the first token and the last one are parsed as JSON; the rest
are only looked at for an in-band error. An event is one `data:` line, as every
OpenAI-compatible server writes it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamError(Exception):
    """The stream did not carry the completion that was asked for."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None if the server does not say."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def check(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Raise StreamError unless the counts are the requested ones."""
        asked = prompt_tokens, completion_tokens
        if (self.prompt_tokens, self.completion_tokens) != asked:
            raise StreamError(
                f"asked for {asked[0]} prompt and {asked[1]} output tokens, usage says "
                f"{self.prompt_tokens} and {self.completion_tokens}"
            )


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def has_tokens(self) -> bool:
        return any(choice.text or choice.token_ids for choice in self.choices)


_decode = msgspec.json.Decoder(_Event).decode


class CompletionStream:
    """Feed it the body as it comes in; ask for `usage()` when the body has ended.

    `first_token_ns` and `last_token_ns` are the times given with the pieces that
    completed the first and the last event with tokens.
    """

    def __init__(self) -> None:
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self._tail: list[bytes] = []
        self._last = b""
        self._last_ns = 0
        self._previous_ns = 0
        self._done = False

    def feed(self, piece: bytes, now_ns: int) -> None:
        """Take the next bytes of the body, cut anywhere. Raises StreamError."""
        if b"\n" not in piece:
            self._tail.append(piece)
            return
        *lines, tail = b"".join([*self._tail, piece]).split(b"\n")
        self._tail = [tail]
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_ns)

    def usage(self) -> Usage:
        """Return the server's token counts. Raises StreamError if the stream is cut.

        Sets `last_token_ns`: the event before the last if that carries usage only.
        """
        if not self._done:
            raise StreamError("stream ended without [DONE]")
        if self.first_token_ns is None:
            raise StreamError("stream ended without a token")
        last = _parse(self._last)
        self.last_token_ns = self._last_ns if last.has_tokens else self._previous_ns
        if last.usage is None:
            raise StreamError("stream ended without usage")
        return last.usage

    def _event(self, data: bytes, now_ns: int) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        if data.startswith(b'{"error"'):
            _parse(data)
        if self.first_token_ns is None and _parse(data).has_tokens:
            self.first_token_ns = now_ns
        self._last, self._previous_ns, self._last_ns = data, self._last_ns, now_ns


def _parse(data: bytes) -> _Event:
    try:
        event = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StreamError(f"undecodable event {data[:200]!r}: {error}") from error
    if event.error is not None:
        raise StreamError(f"in-band error: {msgspec.json.encode(event.error).decode()}")
    return event
