# SPDX-License-Identifier: Apache-2.0
"""A request's body: the prompt as routing needs it, and the payloads for instances.

A prompt is its decoded text in UTF-8, or its token ids without blanks, so that clients
which encode the same JSON differently send the same prompt. That of a chat is all
strings of its tools and messages. Prefix keys are chained hashes of fixed-size pieces
of these bytes. Keys live as long as this process: Python's own salted hash makes them
(SipHash, 64 bits), and a collision would be a wrong estimate, not a wrong answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from kvtax_fleet.proxy.apis import APIS, CHAT, COMPLETIONS, UNREADABLE, Api

# Bytes of a piece: 300 to 400 token ids, or 512 tokens of text. Half the size would be
# twice as fine and cost a 33k-token prompt another 0.1 ms.
PIECE_BYTES = 2048
# Bytes of a token of text: typical of English text and code in common vocabularies.
BYTES_PER_TOKEN = 4

Form = Literal["ids", "text", "chat", "other"]
Fields = dict[str, msgspec.Raw]
# The request that an upstream sends: JSON over HTTP, a struct in virtual time.
Payload = TypeVar("Payload")
_encode = msgspec.json.encode
_decode = msgspec.json.decode
# Each value stays bytes.
decode_fields = msgspec.json.Decoder(Fields).decode
_TRANSFER = "kv_transfer_params"
_DECIDE_CACHE = ("model", "cache_salt")
_BLANKS = b" \t\n\r"


class BodyError(Exception):
    """The body is no JSON object."""


class RequestBody(ABC, Generic[Payload]):
    """A request's prompt, and the payloads to send to instances.

    `raw`: the payload without KV transfer. `fields`: the JSON of each field.
    """

    raw: Payload
    prompt: bytes
    prompt_tokens: int
    form: Form
    fields: Fields
    _keys: list[int] | None = None

    @abstractmethod
    def with_transfer(self, params: dict[str, Any]) -> Payload:
        """Return the payload with these kv_transfer_params."""

    @abstractmethod
    def prefill_only(self, params: dict[str, Any]) -> Payload:
        """Return the payload that prefills the prompt and answers with one token."""

    def text(self, field: str) -> bytes:
        """Return a field's JSON, empty without the field."""
        return bytes(self.fields.get(field, b""))

    @property
    def streams(self) -> bool:
        """Return whether the answer is to be a stream."""
        return self.text("stream") == b"true"

    @property
    def single(self) -> bool:
        """Return whether one answer to one prompt is requested."""
        single = self.text("n") in (b"", b"1", b"null") and not self.text("best_of")
        return single and self.form != "other" and not self.text("use_beam_search")

    def tokens_in(self, pieces: int) -> int:
        """Return the tokens in the first `pieces` pieces, all but the last at most.

        vLLM computes at least the last token of a prompt, whatever it has cached.
        """
        end = pieces * PIECE_BYTES
        is_ids = self.form == "ids"
        tokens = _commas(self.prompt[:end]) if is_ids else end // BYTES_PER_TOKEN
        return min(tokens, self.prompt_tokens - 1)

    def keys(self) -> list[int]:
        """Return the keys of the prompt's whole pieces.

        The first key includes whatever else decides what is cached.
        """
        if self._keys is None:
            self._keys = self._chained()
        return self._keys

    def _chained(self) -> list[int]:
        prompt = self.prompt
        key = hash(tuple(_canonical(self.text(field)) for field in _DECIDE_CACHE))
        keys = []
        for start in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES):
            key = hash((key, prompt[start : start + PIECE_BYTES]))
            keys.append(key)
        return keys


class Body(RequestBody[bytes]):
    """A JSON body; `raw` is the client's bytes, without fields that it must not set."""

    def __init__(self, raw: bytes, api: Api = APIS[COMPLETIONS]) -> None:
        """Read the body of a request to `api`. Raises BodyError."""
        try:
            self.fields = decode_fields(raw)
            self.raw = _encode(self.fields) if self._strip() else raw
            parts = [self.text(name) for name in api.prompt]
            self.form = "chat" if api.path == CHAT else _form_of(parts[0])
            self.prompt = _prompt_of(self.form, parts)
        except msgspec.ValidationError:
            raise BodyError("the body is no JSON object") from None
        except UNREADABLE as error:
            raise BodyError(f"the body is no valid JSON: {error}") from None
        if self.form == "ids":
            self.prompt_tokens = _commas(self.prompt) + 1
        else:
            self.prompt_tokens = len(self.prompt) // BYTES_PER_TOKEN + 1

    def with_transfer(self, params: dict[str, Any]) -> bytes:
        return _encode({**self.fields, _TRANSFER: params})

    def prefill_only(self, params: dict[str, Any]) -> bytes:
        left_out = ("stream_options", "min_tokens", "max_completion_tokens")
        fields: dict[str, Any] = {
            name: value for name, value in self.fields.items() if name not in left_out
        }
        if self.form == "chat":
            fields["max_completion_tokens"] = 1
        return _encode({**fields, "max_tokens": 1, "stream": False, _TRANSFER: params})

    def _strip(self) -> bool:
        """Remove kv_transfer_params; return whether there were any.

        A client that could set them could make an instance connect anywhere. vLLM also
        takes them from `vllm_xargs`.
        """
        had_params = self.fields.pop(_TRANSFER, None) is not None
        extra = self.fields.get("vllm_xargs")
        if extra is None:
            return had_params
        try:
            arguments = decode_fields(extra)
        except msgspec.DecodeError:
            return had_params
        if arguments.pop(_TRANSFER, None) is None:
            return had_params
        self.fields["vllm_xargs"] = msgspec.Raw(_encode(arguments))
        return True


def _form_of(prompt: bytes) -> Form:
    start = prompt[:64].lstrip()
    if start.startswith(b'"'):
        return "text"
    inside = start[1:].lstrip()[:1]
    return "ids" if start.startswith(b"[") and inside.isdigit() else "other"


def _prompt_of(form: Form, parts: list[bytes]) -> bytes:
    """Return the same bytes for all encodings of a prompt. Raises UNREADABLE."""
    if form == "ids":
        return parts[0].translate(None, _BLANKS)
    values = [_decode(part) for part in parts if part]
    strings = [text for value in values for text in _strings(value)]
    return "\n".join(strings).encode(errors="surrogatepass")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, and the names of fields, in sorted order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from _strings(value[name])
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif value is not None:
        yield str(value)


def _canonical(raw: bytes) -> bytes:
    """Return the same bytes for all encodings of a JSON value."""
    return _encode(_decode(raw)) if raw else b""


def _commas(prompt: bytes) -> int:
    if len(prompt) < 4096:
        return prompt.count(b",")
    # Four times as fast as bytes.count.
    return int(np.count_nonzero(np.frombuffer(prompt, np.uint8) == ord(",")))
