# SPDX-License-Identifier: Apache-2.0
"""Choice of steps at random, one in each N."""

from __future__ import annotations

import random


class Draw:
    """One step of each `every` steps, drawn at random.

    A fixed stride would keep step with work that returns every so many steps.
    """

    __slots__ = ("_block", "_every", "_random", "next")

    def __init__(self, every: int):
        self._every = every
        self._random = random.Random()
        self._block = -every
        # The step chosen last, until a later step comes; then the one to come.
        self.next = -1

    def is_chosen(self, step: int) -> bool:
        """Return whether a step is chosen; steps count up from 0 without gaps."""
        if step > self.next:
            self._block += self._every
            self.next = self._block + int(self._random.random() * self._every)
        return step == self.next
