# SPDX-License-Identifier: Apache-2.0
"""What the workers of one proxy have in common, in memory that survives each of them.

It is made before they are forked, and has no locks: a worker that is killed in the
middle leaves none held. Loads are in rows, one for each worker to write. Where a
session is may be written by any of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .loads import row_words
from .pins import Pin

# A session has one slot that it can be in, by its hash, and the newest has it: of
# 10,000 sessions one in a hundred loses its place to another.
SLOTS = 1 << 20
_MOST_TURNS, _MOST_TOKENS = (1 << 16) - 1, (1 << 32) - 1
_WORD = (1 << 64) - 1


class SharedPins:
    """Pins that several workers read and write.

    A slot is two words: what is pinned, and the session's hash XOR that. So a slot that
    two write at once, each a word of it, is nobody's. Workers agree about hashes as
    they are forked from one process. `names`: the instances, at most 65,536.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._words = memoryview(mmap.mmap(-1, 16 * SLOTS)).cast("Q")

    def of(self, session: str | None) -> Pin | None:
        if session is None:
            return None
        key = hash(session) & _WORD
        at = 2 * (key % SLOTS)
        pinned = self._words[at]
        if not pinned or self._words[at + 1] ^ pinned != key:
            return None
        place, turns = pinned & 0xFFFF, pinned >> 16 & _MOST_TURNS
        return Pin(self._names[place], turns, pinned >> 32)

    def note(self, session: str | None, instance: str, prompt_tokens: int) -> None:
        """A request of the session goes to an instance."""
        if session is None:
            return
        pin = self.of(session)
        if pin is None or pin.instance != instance:
            pin = Pin(instance, 0, min(prompt_tokens, _MOST_TOKENS))
        turns = min(pin.turns + 1, _MOST_TURNS)
        pinned = pin.at_tokens << 32 | turns << 16 | self._places[instance]
        key = hash(session) & _WORD
        at = 2 * (key % SLOTS)
        self._words[at], self._words[at + 1] = pinned, key ^ pinned


class Shared:
    """`loads` as FleetLoad takes them; `ports`: where each worker answers the others,
    0 for one that does not.
    """

    def __init__(self, workers: int, names: Sequence[str]) -> None:
        words = row_words(len(names))
        self.loads = _integers(workers * words).reshape(workers, words)
        self.ports = _integers(workers)
        self.pins = SharedPins(names)

    def clear(self, place: int) -> None:
        """The worker at this place is no more, and nothing of it is in flight."""
        self.loads[place] = 0
        self.ports[place] = 0


class Seat(NamedTuple):
    """A worker's place among the others, and its number, which no other ever has."""

    shared: Shared
    place: int
    number: int


def _integers(count: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
