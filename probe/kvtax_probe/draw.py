# SPDX-License-Identifier: Apache-2.0
"""Choice of steps at random, one in each N."""

from __future__ import annotations

import random


class Draw:
    """One of each `every` numbers, drawn at random.

    A fixed stride would keep step with work that returns every so many steps.
    """

    __slots__ = ("_block", "_every", "_random", "next")

    def __init__(self, every: int):
        self._every = every
        self._random = random.Random().random
        self._block = -every
        # The number that was drawn last.
        self.next = self.go_on()

    def go_on(self) -> int:
        """Draw the number of the next block, and return it."""
        every = self._every
        self._block += every
        self.next = self._block + (int(self._random() * every) if every > 1 else 0)
        return self.next
