# SPDX-License-Identifier: Apache-2.0
"""Sessions: which one a request belongs to, and the instance that serves each.

A request that names no session belongs to the one whose prompt it continues: an agent's
next turn sends again, byte for byte, the earlier prompt, and then more. A prompt ends
with one byte that its next turn does not have there: a bracket or a quote.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Any, NamedTuple

from kvtax_fleet.proxy.body import PIECE_BYTES, RequestBody

# Limits of remembered turns, some 300 bytes each: all, and those that end in one piece.
MAX_TURNS = 100_000
MAX_ALIKE = 64
MAX_SESSIONS = 100_000


class _Turn(NamedTuple):
    """A prompt after its last whole piece, and its session."""

    rest_bytes: int
    rest_hash: int
    session: str


class Sessions:
    """The ends of the last turns, by the key of their last whole piece."""

    def __init__(self) -> None:
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
        session = self._found(prompt, keys) or f"kvtax/{next(self._numbers)}"
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
        return None if session is None else self._pins.get(hash(session))

    def note(self, session: str | None, instance: str, prompt_tokens: int) -> None:
        """Note that a request of the session goes to an instance."""
        if session is None:
            return
        key = hash(session)
        pin = self._pins.get(key)
        if pin is None or pin.instance != instance:
            pin = Pin(instance, 0, prompt_tokens)
        self._pins[key] = pin._replace(turns=pin.turns + 1)
        self._pins.move_to_end(key)
        if len(self._pins) > MAX_SESSIONS:
            self._pins.popitem(last=False)
