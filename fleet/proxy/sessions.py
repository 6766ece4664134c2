# SPDX-License-Identifier: Apache-2.0
"""Which session a request belongs to that does not say: that of the prompt it goes on.

An agent's next turn sends again, byte for byte, what it has sent before, and then more.
A prompt ends with one byte that its next turn has not got there: a bracket or a quote.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import NamedTuple

from .body import PIECE_BYTES, Body

# Pieces in which remembered turns end; and the turns that end in the same one.
MAX_PIECES = 100_000
MAX_ALIKE = 64


class _Turn(NamedTuple):
    """A prompt after its last whole piece, and whose it is."""

    rest_bytes: int
    rest_hash: int
    session: str


class Sessions:
    """Remembers where the last turns ended, by the key of their last whole piece.

    `prefix`: what the names of its sessions begin with.
    """

    def __init__(self, prefix: str = "kvtax/") -> None:
        self._prefix = prefix
        self._turns: OrderedDict[int, list[_Turn]] = OrderedDict()
        self._numbers = count()

    def of(self, body: Body) -> str | None:
        """The session of the longest turn that the prompt begins with, or a new one.

        None for a prompt of less than a piece: there is nothing to come back for.
        """
        prompt = body.prompt
        pieces = (len(prompt) - 1) // PIECE_BYTES
        if pieces < 1:
            return None
        keys = body.keys()[:pieces]
        session = self._found(prompt, keys) or f"{self._prefix}{next(self._numbers)}"
        rest = prompt[pieces * PIECE_BYTES : -1]
        alike = self._turns.pop(keys[-1], [])
        turn = _Turn(len(rest), hash(rest), session)
        others = [one for one in alike if one[:2] != turn[:2]]
        self._turns[keys[-1]] = [turn, *others][:MAX_ALIKE]
        if len(self._turns) > MAX_PIECES:
            self._turns.popitem(last=False)
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
