# SPDX-License-Identifier: Apache-2.0
"""Cut the prompt of a logged body into blocks with names that reveal no text.

The prompt is the text that a model would read, in that order. Chat templates are not
applied: equal beginnings stay equal, and a conversation's next turn begins with the
turn before. Without a tokenizer, a token is estimated to be a fixed number of
characters, so that equal beginnings are cut alike.

A block's name is a hash of the prompt up to its end, keyed with random bytes that exist
only in this process: a text cannot be found by trying, later or elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtax_fleet.trace.request import TraceError

# A line of a request log, or an object in it.
LogRow = dict[str, Any]
# Marks where a prompt may be cached; clients move it from turn to turn.
NOT_READ = frozenset({"cache_control"})
BINARY = frozenset({"data", "file_data"})
# Reasoning that only its maker can read, and proofs of it.
BINARY |= {"encrypted_content", "signature", "thought_signature", "thoughtSignature"}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


class FieldError(ValueError):
    """A field of a line is missing or cannot be read."""


def asked_of(body: LogRow) -> Asked:
    """Return a chat's tools, system prompt and messages; a text; or token ids.

    Raises FieldError.
    """
    if (messages := body.get("messages")) is not None:
        return _chat(body, "messages", messages)
    if (prompt := body.get("prompt")) is not None:
        return _completion(prompt)
    return _chat(body, "input", body.get("input"))


def text_of(value: Any) -> str:
    """Join all text in a JSON value, in a fixed order, with the names of fields."""
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


def _chat(body: LogRow, name: str, messages: Any) -> list[str]:
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
    """Recognise what models do not read as text: images, sounds, files, proofs."""
    return isinstance(value, str) and (key in BINARY or value.startswith("data:"))


def _digest(data: str) -> str:
    return blake2b(data.encode(), digest_size=16).hexdigest()


# A completion's text, a chat's texts, or token ids.
Asked = str | list[str] | list[int]
StrPath = str | PathLike[str]
_KEY = secrets.token_bytes(32)
CHARS_PER_TOKEN = 4.0  # English text and code, with common vocabularies
# Recent texts whose tokens are kept: a conversation's next turn repeats them.
KEPT_TEXTS = 4096


class Prompt(NamedTuple):
    """A prompt in blocks.

    `blocks`: names of its whole blocks, int64; the rest of the tokens has none.

    `beginnings`: hashes of its first message, its first two, and so on; of its blocks,
    where it is not a chat.
    """

    tokens: int
    blocks: NDArray[Any]
    beginnings: list[bytes]


class Tokens:
    """Counter of tokens: by a `tokenizer` (tokenizer.json or its folder) or estimated.

    Raises TraceError if the tokenizer cannot be read.
    """

    def __init__(
        self, chars_per_token: float, tokenizer: StrPath | None = None
    ) -> None:
        self.chars_per_token = None if tokenizer else chars_per_token
        if tokenizer:
            self._encode = lru_cache(KEPT_TEXTS)(_encoder(Path(tokenizer)))

    def count(self, text: str) -> int:
        if self.chars_per_token is None:
            return len(self._encode(text))
        return round(len(text) / self.chars_per_token)

    def prompt(self, asked: Asked, block_tokens: int) -> Prompt:
        """Cut a prompt into blocks."""
        size = block_tokens
        texts = [asked] if isinstance(asked, str) else asked
        if isinstance(texts[0], int):
            units = np.array(texts, "<u4").tobytes()
        elif self.chars_per_token is None:
            units = b"".join(self._encode(text).tobytes() for text in texts)
        else:
            # Four bytes for each character, as for each token id.
            units = "".join(texts).encode("utf-32-le")
            size = max(1, round(block_tokens * self.chars_per_token))
        chain = list(_chained(_cut(units, 4 * size)))
        blocks = np.array([int.from_bytes(link[:8]) >> 1 for link in chain], np.int64)
        if isinstance(asked, list) and isinstance(asked[0], str):
            chain = list(_chained(text.encode() for text in asked))
        return Prompt(len(units) // 4 * block_tokens // size, blocks, chain)


def _cut(units: bytes, size: int) -> Iterator[bytes]:
    for end in range(size, len(units) + 1, size):
        yield units[end - size : end]


def _chained(parts: Iterable[bytes]) -> Iterator[bytes]:
    links = accumulate(parts, _link, initial=b"")
    next(links)
    return links


def _link(before: bytes, part: bytes) -> bytes:
    return blake2b(before + part, key=_KEY, digest_size=16).digest()


def _encoder(path: Path) -> Callable[[str], NDArray[Any]]:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise TraceError(
            "--tokenizer needs the package tokenizers: pip install tokenizers, or "
            "leave --tokenizer out"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TraceError(f"{file}: no tokenizer.json of a model: {error}") from None

    def encode(text: str) -> NDArray[Any]:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, "<u4")

    return encode
