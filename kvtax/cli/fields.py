# SPDX-License-Identifier: Apache-2.0
"""The meaning of each field of a record file, for `kvtax look --fields`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtax.records.formats import Format

# Entry points by which another package adds its formats.
ENTRY_POINTS = "kvtax.formats"


class UnknownFileError(Exception):
    """No format has this name; the message lists those there are."""

    exit_code = 2


def print_fields(file: str) -> None:
    """Print the fields of `file`, or without a name all files.

    Raises UnknownFileError.
    """
    from kvtax.records.formats import described

    known = formats()
    if not file:
        width = max(len(form.name) for form in known)
        print("\n".join(f"{form.name:{width}}  {form.purpose}" for form in known))
        return
    path = "/" + file.removesuffix(".gz")
    for form in known:
        if fnmatch(path, "*/" + form.name):
            print(described(form), end="")
            return
    names = ", ".join(form.name for form in known)
    raise UnknownFileError(f"no file format {file!r}; there are: {names}")


def formats() -> Sequence[Format]:
    """List all file formats, those of other installed packages last."""
    from kvtax.records.formats import FORMATS

    added = [point.load() for point in entry_points(group=ENTRY_POINTS)]
    return [*FORMATS, *(form for package in added for form in package)]
