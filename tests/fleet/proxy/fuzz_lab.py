# SPDX-License-Identifier: Apache-2.0
"""Chance, and a connection without a network: what the proxy's fuzz tests share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

Check = Callable[[random.Random], Awaitable[None]]


def changed(chance: random.Random, data: bytes, splices: Sequence[bytes]) -> bytes:
    """The bytes with up to four changes; as they are, for one in four."""
    made = bytearray(data)
    for _ in range(chance.choice((0, 1, 2, 4))):
        place = chance.randrange(len(made) + 1)
        splice = chance.choice((chance.randbytes(1), *splices))
        made[place : place + chance.randrange(4)] = splice
    return bytes(made)


def cut(chance: random.Random, data: bytes) -> list[bytes]:
    """The bytes in up to five pieces, of which none is empty."""
    places = {chance.randrange(len(data) + 1) for _ in range(chance.randrange(5))}
    places = sorted({0, *places, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


class Socket:
    """A transport that keeps what is written, and refuses what a real one refuses."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.ended
        self.written += data

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.write(b"".join(pieces))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert not self.aborted
        self.ended = True

    def abort(self) -> None:
        self.ended = self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        assert not self.aborted
        return 0

    def pause_reading(self) -> None:
        assert not self.aborted

    resume_reading = pause_reading
