# SPDX-License-Identifier: Apache-2.0
"""A reason to doubt a number: one type for sweeps, fleets, gates and `kvtax look`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtax.records import RecordsError


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


def unreadable(
    name: str, error: RecordsError | OSError, remedy: str = "The instance is left out"
) -> RunWarning:
    """Warn of an instance, or a file, that is not what it should be."""
    return RunWarning("unreadable", name, str(error), f"{remedy}; see the file")


def stranger(path: Path, why: str) -> RunWarning:
    """Warn of a file that lies beside records to which it does not belong."""
    remedy = (
        "The file is left out; keep the records of each life in a folder of its own"
    )
    return RunWarning("another_life", path.name, f"{path}: {why}", remedy)


def left_out(name: str, torn_lines: int, bad: Sequence[str]) -> list[RunWarning]:
    """Warn of lines and parts of a file that are left out."""
    warnings = []
    if torn_lines:
        told = f"{torn_lines} torn last line{'s'[: torn_lines > 1]} left out"
        remedy = "Nothing: a stopped writer leaves one"
        warnings.append(RunWarning("torn_lines", name, told, remedy))
    if bad:
        first, *others = bad
        more = f", and {len(others):,} more like it" if others else ""
        remedy = "They are left out, the rest is shown; see the file"
        warnings.append(RunWarning("bad_lines", name, f"{first}{more}", remedy))
    return warnings
