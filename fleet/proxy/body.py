# SPDX-License-Identifier: Apache-2.0
"""A request's body: what routing needs of it, and nothing parsed beyond that.

Only the top level is looked at; the prompt stays the bytes it is, and a chat's is its
tools, system prompt and messages one after the other. Its prefix keys are hashes of
fixed-size pieces of these bytes, chained, so that token ids, text and chats are routed
alike. The keys live and die with this process: Python's own salted hash makes them
(SipHash, 64 bits), and two prompts that collided would be a wrong estimate, not a wrong
answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from .apis import APIS, COMPLETIONS, Api
from .steady import steady
from .top_level import UNREADABLE, Fields, decode, top_level

# A piece is about 300 to 400 token ids, or 512 tokens of text. Half the size would be
# twice as fine and cost a 33k-token prompt another 0.1 ms.
PIECE_BYTES = 2048
# Without a tokenizer: what English text and code come to with common vocabularies.
BYTES_PER_TOKEN = 4

Form = Literal["ids", "text", "chat", "other"]
_encode = msgspec.json.encode
_TRANSFER = "kv_transfer_params"
_ALSO_DECIDE = ("model", "cache_salt", "previous_response_id")


class BodyError(Exception):
    """The body is no JSON object."""


class Body:
    """`raw` is what to send on: the client's bytes, without fields it must not set."""

    api = APIS[COMPLETIONS]
    session: str | None = None
    """Whose it is, where it says nothing itself."""
    _ids_found = False
    _keys: list[int] | None = None

    def __init__(self, raw: bytes, api: Api = api) -> None:
        """`api`: what it was sent to. Raises BodyError."""
        self.api = api
        is_chat = api.path != COMPLETIONS
        try:
            self._fields = top_level(raw)
            self.raw = _encode(self._fields) if self._strip() else raw
            parts = [self.text(name) for name in api.prompt]
            self.prompt = b"".join(map(steady, parts) if is_chat else parts)
        except msgspec.ValidationError:
            raise BodyError("the body is no JSON object") from None
        except UNREADABLE as error:
            raise BodyError(f"the body is no valid JSON: {error}") from None
        self.form = "chat" if is_chat else _form_of(self.prompt)
        if self.has_ids:
            self.prompt_tokens = _commas(self.prompt) + 1
        else:
            self.prompt_tokens = len(self.prompt) // BYTES_PER_TOKEN + 1

    def take_ids(self, ids: bytes) -> None:
        """The prompt's token ids, a JSON array, take the place of what was sent."""
        self.prompt, self._keys = ids, None
        self.prompt_tokens = _commas(ids) + 1
        self._ids_found = True

    @property
    def has_ids(self) -> bool:
        return self._ids_found or self.form == "ids"

    @property
    def fields(self) -> Fields:
        """The JSON of each field."""
        return self._fields

    def text(self, field: str) -> bytes:
        """A field's JSON, empty if it is not there."""
        return bytes(self._fields.get(field, b""))

    @property
    def single(self) -> bool:
        """Whether it asks for one answer to one prompt."""
        one = self.text("n") in (b"", b"1", b"null") and not self.text("best_of")
        return one and self.form != "other" and not self.text("use_beam_search")

    def tokens_in(self, pieces: int) -> int:
        """Tokens in the first `pieces` pieces of the prompt, but never all of them.

        vLLM computes at least the last one, whatever it has cached.
        """
        end = pieces * PIECE_BYTES
        tokens = _commas(self.prompt[:end]) if self.has_ids else end // BYTES_PER_TOKEN
        return min(tokens, self.prompt_tokens - 1)

    def keys(self) -> list[int]:
        """The keys of the prompt's whole pieces.

        The first key also holds what else decides what is cached: the model, the salt,
        and the answer that the prompt goes on from.
        """
        if self._keys is None:
            self._keys = self._chained()
        return self._keys

    def _chained(self) -> list[int]:
        prompt = self.prompt
        key = hash(tuple(map(self.text, _ALSO_DECIDE)))
        keys = []
        for start in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES):
            key = hash((key, prompt[start : start + PIECE_BYTES]))
            keys.append(key)
        return keys

    def with_transfer(self, params: dict[str, Any]) -> bytes:
        """The body with these kv_transfer_params."""
        return _encode({**self._fields, _TRANSFER: params})

    def prefill_only(self, params: dict[str, Any]) -> bytes:
        """The body of a request that prefills the prompt and answers with one token."""
        left_out = ("stream_options", "min_tokens", "max_completion_tokens")
        fields: dict[str, Any] = {
            name: value for name, value in self._fields.items() if name not in left_out
        }
        if self.form == "chat":
            fields["max_completion_tokens"] = 1
        return _encode({**fields, "max_tokens": 1, "stream": False, _TRANSFER: params})

    def _strip(self) -> bool:
        """Take out kv_transfer_params; says whether there was anything to take.

        A client that could set them could make an instance connect anywhere. vLLM also
        takes them from `vllm_xargs`.
        """
        found = self._fields.pop(_TRANSFER, None) is not None
        extra = self._fields.get("vllm_xargs")
        if extra is None:
            return found
        try:
            arguments = decode(extra)
        except msgspec.DecodeError:
            return found
        if arguments.pop(_TRANSFER, None) is None:
            return found
        self._fields["vllm_xargs"] = msgspec.Raw(_encode(arguments))
        return True


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
