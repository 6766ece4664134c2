# SPDX-License-Identifier: Apache-2.0
"""The phases of a trial, in the order in which the driver runs them.

Files name a phase by its `label`, followed by `.1`, `.2` ... where it comes again; a
table of steps holds its number.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The cache fills up, stays full, and fills again after it was reset.

    A trial may go through growth and plateau several times, with a reset before each.
    """

    GROWTH = 0
    PLATEAU = 1
    AFTER_RESET = 2

    @property
    def label(self) -> str:
        """The name that plans and request records use."""
        return self.name.lower()

    def named(self, cycle: int) -> str:
        """The name of its `cycle`-th time, from 0."""
        return f"{self.label}.{cycle}" if cycle else self.label

    @classmethod
    def of(cls, name: str) -> Phase | None:
        """The phase that a file means by `name`; None for another's."""
        label = name.partition(".")[0]
        return next((phase for phase in cls if phase.label == label), None)
