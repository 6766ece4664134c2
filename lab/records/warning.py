# SPDX-License-Identifier: Apache-2.0
"""A reason to doubt a number of a run, as it stands in a report's document."""

from __future__ import annotations

import msgspec


class RunWarning(msgspec.Struct, frozen=True):
    """A reason to doubt a number, and what to do about it."""

    kind: str
    """What is doubtful, in a word or two: `few_sessions`."""
    message: str
    """What was seen, with its figures."""
    remedy: str
    """What to do about it, as a sentence in the imperative."""

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}"
