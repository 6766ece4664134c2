# SPDX-License-Identifier: Apache-2.0
"""The phases of a trial, in the order in which the driver runs them.

Files name a phase by its `label`; a table of steps holds its number.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The cache fills up, stays full, and fills again after it was reset."""

    GROWTH = 0
    PLATEAU = 1
    AFTER_RESET = 2

    @property
    def label(self) -> str:
        """The name that plans and request records use."""
        return self.name.lower()
