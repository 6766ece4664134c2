# SPDX-License-Identifier: Apache-2.0
"""Sessions: which one a request belongs to, and the instance that serves each.

A request that names no session belongs to the one whose prompt it continues: an agent's
next turn sends again, byte for byte, the earlier prompt, and then more. A prompt ends
with one byte that its next turn does not have there: a bracket or a quote.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from .body import PIECE_BYTES, RequestBody

# Limits of remembered turns, some 300 bytes each: all, and those that end in one piece.
MAX_TURNS = 100_000
MAX_ALIKE = 64
MAX_SESSIONS = 100_000
# Slots of shared pins. A session has one slot, by its hash, and the newest session has
# it: of 10,000 sessions one in a hundred loses its slot to another.
SLOTS = 1 << 20
_MAX_TURNS, _MAX_TOKENS = (1 << 16) - 1, (1 << 32) - 1
_WORD = (1 << 64) - 1


class _Turn(NamedTuple):
    """A prompt after its last whole piece, and its session."""

    rest_bytes: int
    rest_hash: int
    session: str


class Sessions:
    """The ends of the last turns, by the key of their last whole piece.

    `prefix`: the beginning of the names of its sessions.
    """

    def __init__(self, prefix: str = "kvtax/") -> None:
        self._prefix = prefix
        self._turns: OrderedDict[int, list[_Turn]] = OrderedDict()
        self._count = 0
        self._numbers = count()

    def of(self, body: RequestBody[Any]) -> str | None:
        """Return the session of the longest turn that the prompt continues, or new.

        None for a prompt of less than a piece, which has nothing to return for.
        """
        prompt = body.prompt
        pieces = (len(prompt) - 1) // PIECE_BYTES
        if pieces < 1:
            return None
        keys = body.keys()[:pieces]
        session = self._found(prompt, keys) or f"{self._prefix}{next(self._numbers)}"
        rest = prompt[pieces * PIECE_BYTES : -1]
        alike = self._turns.pop(keys[-1], [])
        before = len(alike)
        turn = _Turn(len(rest), hash(rest), session)
        others = [other for other in alike if other[:2] != turn[:2]]
        self._turns[keys[-1]] = kept = [turn, *others][:MAX_ALIKE]
        self._count += len(kept) - before
        while self._count > MAX_TURNS:
            self._count -= len(self._turns.popitem(last=False)[1])
        return session

    def _found(self, prompt: bytes, keys: list[int]) -> str | None:
        end = len(prompt) - 1
        for depth in range(len(keys), 0, -1):
            start = depth * PIECE_BYTES
            longest_first = sorted(self._turns.get(keys[depth - 1], ()), reverse=True)
            for turn in longest_first:
                stop = start + turn.rest_bytes
                if stop <= end and hash(prompt[start:stop]) == turn.rest_hash:
                    return turn.session
        return None


class Pin(NamedTuple):
    """The instance of a session, and its stay there.

    `turns`: requests since it came there. `at_tokens`: length of the first prompt.
    """

    instance: str
    turns: int
    at_tokens: int


class Pins:
    """The pins of the last MAX_SESSIONS sessions, for policies with affinity.

    A session is its hash, of 64 bits and salted: its name may be long.
    """

    def __init__(self) -> None:
        self._pins: OrderedDict[int, Pin] = OrderedDict()

    def of(self, session: str | None) -> Pin | None:
        """Return the session's pin, if there is one."""
        return None if session is None else self._read(session)

    def note(self, session: str | None, instance: str, prompt_tokens: int) -> None:
        """Note that a request of the session goes to an instance."""
        if session is None:
            return
        pin = self._read(session)
        if pin is None or pin.instance != instance:
            pin = Pin(instance, 0, prompt_tokens)
        self._write(session, pin._replace(turns=pin.turns + 1))

    def _read(self, session: str) -> Pin | None:
        return self._pins.get(hash(session))

    def _write(self, session: str, pin: Pin) -> None:
        key = hash(session)
        self._pins[key] = pin
        self._pins.move_to_end(key)
        if len(self._pins) > MAX_SESSIONS:
            self._pins.popitem(last=False)


class SharedPins(Pins):
    """Pins in memory that several workers read and write.

    A slot is two words: the pin, and the session's hash XOR the pin. A slot of which
    two workers wrote a word each is therefore no session's. Workers agree about hashes
    as they are forks of one process. `names`: the instances, at most 65,536.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._words = memoryview(mmap.mmap(-1, 16 * SLOTS)).cast("Q")

    def _read(self, session: str) -> Pin | None:
        key = hash(session) & _WORD
        at = 2 * (key % SLOTS)
        pinned = self._words[at]
        if not pinned or self._words[at + 1] ^ pinned != key:
            return None
        place, turns = pinned & 0xFFFF, pinned >> 16 & _MAX_TURNS
        return Pin(self._names[place], turns, pinned >> 32)

    def _write(self, session: str, pin: Pin) -> None:
        turns, tokens = min(pin.turns, _MAX_TURNS), min(pin.at_tokens, _MAX_TOKENS)
        pinned = tokens << 32 | turns << 16 | self._places[pin.instance]
        key = hash(session) & _WORD
        at = 2 * (key % SLOTS)
        self._words[at], self._words[at + 1] = pinned, key ^ pinned
