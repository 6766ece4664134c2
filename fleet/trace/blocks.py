# SPDX-License-Identifier: Apache-2.0
"""Cut prompts into blocks, and give the blocks names that tell nothing of the text.

A block's name is a hash of all the prompt up to its end, keyed with random bytes that
exist only in this process: nobody can find a text by trying, later or elsewhere.

Without a tokenizer a token is taken to be a fixed number of characters, so that equal
beginnings are cut alike.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from fleet.trace.request import TraceError

# A completion's text, a chat's texts, or token ids.
Asked = str | list[str] | list[int]
StrPath = str | PathLike[str]
_KEY = secrets.token_bytes(32)
CHARS_PER_TOKEN = 4.0  # English text and code, with common vocabularies
# Recent texts whose tokens are kept: a conversation's next turn repeats them.
KEPT_TEXTS = 4096


class Prompt(NamedTuple):
    """`blocks`: names of its whole blocks, int64; the rest of the tokens has none.

    `beginnings`: hashes of its first message, its first two, and so on; of its blocks,
    where it is not a chat.
    """

    tokens: int
    blocks: np.ndarray
    beginnings: list[bytes]


class Tokens:
    """Counts tokens: by a `tokenizer` (tokenizer.json, or its folder), or estimated.

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
    """The whole blocks."""
    for end in range(size, len(units) + 1, size):
        yield units[end - size : end]


def _chained(parts: Iterable[bytes]) -> Iterator[bytes]:
    """For each part a hash of it and of all before it."""
    links = accumulate(parts, _link, initial=b"")
    next(links)
    return links


def _link(before: bytes, part: bytes) -> bytes:
    return blake2b(before + part, key=_KEY, digest_size=16).digest()


def _encoder(path: Path) -> Callable[[str], np.ndarray]:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TraceError(f"{file}: no tokenizer.json of a model: {error}") from None

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, "<u4")

    return encode
