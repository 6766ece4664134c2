# SPDX-License-Identifier: Apache-2.0
"""A request's body: the prompt as routing needs it, and the payloads for instances.

Only the top level of the JSON is parsed; the prompt stays bytes, and the prompt of a
chat is its tools, system prompt and messages in a row. Prefix keys are chained hashes
of fixed-size pieces of these bytes, so that token ids, text and chats are routed alike.
Keys live as long as this process: Python's own salted hash makes them (SipHash, 64
bits), and a collision would be a wrong estimate, not a wrong answer.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from kvtax_fleet.proxy.apis import APIS, COMPLETIONS, UNREADABLE, Api

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
# Each value stays bytes.
decode_fields = msgspec.json.Decoder(Fields).decode
_string = msgspec.json.Decoder(str).decode
_TRANSFER = "kv_transfer_params"
_DECIDE_CACHE = ("model", "cache_salt", "previous_response_id")

# vLLM leaves this header out (entrypoints/anthropic/serving.py, 0.18.1).
BILLING = "x-anthropic-billing-header"
_MARK = "cache_control"
_HINTS = (_MARK.encode(), BILLING.encode())

# Fields whose strings are text to the model, whatever stands in them.
_TEXTS = frozenset(
    {"arguments", "content", "input", "instructions", "output", "prompt", "system"}
    | {"text", "thinking"}
)
# A picture, sound or file inside a chat counts as this many tokens: a picture of a
# million pixels has 1,000 to 1,500 in common models.
MEDIA_TOKENS = 1024
# Bytes above which a string may be one; the model reads a shorter one at that price.
_MEDIA_BYTES = MEDIA_TOKENS * BYTES_PER_TOKEN
_MEDIA_HINTS = (b"base64", b'"image', b'"input_', b'"audio', b'"video', b'"file')
_MEDIA = re.compile(r"\A(?:data:[^,]{0,200},)?[A-Za-z0-9+/=_\s-]+\Z")


class BodyError(Exception):
    """The body is no JSON object."""


class RequestBody(ABC, Generic[Payload]):
    """A request's prompt, and the payloads to send to instances.

    `raw`: the payload without KV transfer. `session`: the session of a request that
    names none itself. `fields`: the JSON of each field.
    """

    api: Api = APIS[COMPLETIONS]
    session: str | None = None
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

    @property
    def has_ids(self) -> bool:
        return self.form == "ids"

    def text(self, field: str) -> bytes:
        """Return a field's JSON, empty without the field."""
        return bytes(self.fields.get(field, b""))

    @property
    def model(self) -> str | None:
        """The model, None for any."""
        return model_of(self.fields)

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
        tokens = _commas(self.prompt[:end]) if self.has_ids else end // BYTES_PER_TOKEN
        return min(tokens, self.prompt_tokens - 1)

    def keys(self) -> list[int]:
        """Return the keys of the prompt's whole pieces.

        The first key includes whatever else decides what is cached: the model, the
        salt, and the answer that the prompt continues.
        """
        if self._keys is None:
            self._keys = self._chained()
        return self._keys

    def _chained(self) -> list[int]:
        prompt = self.prompt
        key = hash(tuple(map(self.text, _DECIDE_CACHE)))
        keys = []
        for start in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES):
            key = hash((key, prompt[start : start + PIECE_BYTES]))
            keys.append(key)
        return keys


class Body(RequestBody[bytes]):
    """A JSON body; `raw` is the client's bytes, without fields that it must not set."""

    def __init__(self, raw: bytes, api: Api = APIS[COMPLETIONS]) -> None:
        """Read the body of a request to `api`. Raises BodyError."""
        self.api = api
        is_chat = api.path != COMPLETIONS
        try:
            self.fields = decode_fields(raw)
            self.raw = _encode(self.fields) if self._strip() else raw
            parts = [self.text(name) for name in api.prompt]
            # One part alone is not copied.
            if is_chat:
                parts = [normalize_chat(part) for part in parts]
            self.prompt = b"".join(filter(None, parts))
        except msgspec.ValidationError:
            raise BodyError("the body is no JSON object") from None
        except UNREADABLE as error:
            raise BodyError(f"the body is no valid JSON: {error}") from None
        self.form = "chat" if is_chat else _form_of(self.prompt)
        if self.has_ids:
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


def model_of(fields: Fields) -> str | None:
    """Return the model that a request names, None where vLLM takes any or refuses."""
    raw = bytes(fields.get("model", b""))
    return (_string(raw) if raw[:1] == b'"' else None) or None


def normalize_chat(raw: bytes) -> bytes:
    """Leave what the model sees of a part of a chat, and what is the same each turn.

    Anthropic's clients mark the newest messages with `cache_control`, and move the
    marks with each turn. Claude Code begins its system prompt with a billing header
    that has a hash of the request. The bytes of pictures and other media are replaced
    by their hash. Raises one of UNREADABLE.
    """
    if any(hint in raw for hint in _HINTS):
        raw = _encode(_normalized(msgspec.json.decode(raw)))
    if len(raw) > _MEDIA_BYTES and any(hint in raw for hint in _MEDIA_HINTS):
        return _without_media(raw)
    return raw


def _without_media(raw: bytes) -> bytes:
    """Replace media by their hash, and leave all other bytes as they are."""
    value = msgspec.json.decode(raw)
    media = {_encode(text)[1:-1] for text in _media(value)}
    if not all(map(raw.__contains__, media)):  # a client may escape slashes
        raw = _encode(value)
    for encoded in media:
        digest = hashlib.sha256(encoded).hexdigest().encode()
        raw = raw.replace(encoded, digest * (_MEDIA_BYTES // len(digest)))
    return raw


def _media(value: Any, field: str = "") -> Iterator[str]:
    """Yield the strings in a part of a chat that are media in base64."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _media(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _media(part, field)
    elif isinstance(value, str) and len(value) > _MEDIA_BYTES and field not in _TEXTS:
        yield from _MEDIA.findall(value)


def _normalized(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _normalized(part) for name, part in value.items() if name != _MARK
        }
    if isinstance(value, list):
        return [_normalized(part) for part in value if not _is_billing(part)]
    return value


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


def _commas(prompt: bytes) -> int:
    if len(prompt) < 4096:
        return prompt.count(b",")
    # Four times as fast as bytes.count.
    return int(np.count_nonzero(np.frombuffer(prompt, np.uint8) == ord(",")))


def _form_of(prompt: bytes) -> Form:
    start = prompt[:64].lstrip()
    if start.startswith(b'"'):
        return "text"
    inside = start[1:].lstrip()[:1]
    return "ids" if start.startswith(b"[") and inside.isdigit() else "other"
