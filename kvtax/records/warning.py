# SPDX-License-Identifier: Apache-2.0
"""A reason to doubt a number: one type for sweeps, fleets, gates and `kvtax look`."""

from __future__ import annotations

import msgspec


def encodable(text: str) -> str:
    """Show as escapes what is no UTF-8, as a file's name may be."""
    return text.encode(errors="backslashreplace").decode()


class RunWarning(msgspec.Struct, frozen=True):
    """A reason to doubt a number, and what to do about it."""

    kind: str
    """What is doubtful, in a word or two: `few_sessions`."""
    place: str
    """Config, arm, instance or file that it is about; empty for the whole run."""
    message: str
    """The finding with its figures, without a full stop."""
    remedy: str
    """What to do about it, as a sentence in the imperative."""

    def __post_init__(self) -> None:
        """Have a place and a message that can be printed, whatever files they name."""
        for field in ("place", "message"):
            text = getattr(self, field)
            if not text.isascii():
                msgspec.structs.force_setattr(self, field, encodable(text))

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy.rstrip('.')}."

    def within(self, place: str) -> RunWarning:
        """Put `place`, such as an instance's name, in front of the warning's own."""
        inner = "/".join(filter(None, (place, self.place)))
        return RunWarning(self.kind, inner, self.message, self.remedy)
