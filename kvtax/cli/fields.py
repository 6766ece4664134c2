# SPDX-License-Identifier: Apache-2.0
"""Print what each field of a record file means; without FILE, list the files."""

from __future__ import annotations

import argparse
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax fields`."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="a file's name, such as run.json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the fields, or the list of files. Raises UnknownFileError."""
    from kvtax.cli import Exit
    from kvtax.records.formats import described

    known = formats()
    if arguments.file is None:
        width = max(len(form.name) for form in known)
        print("\n".join(f"{form.name:{width}}  {form.purpose}" for form in known))
        return Exit.GOOD
    path = "/" + arguments.file.removesuffix(".gz")
    for form in known:
        if fnmatch(path, "*/" + form.name):
            print(described(form), end="")
            return Exit.GOOD
    names = ", ".join(form.name for form in known)
    raise UnknownFileError(f"no file format {arguments.file!r}; there are: {names}")


def formats() -> Sequence[Format]:
    """All file formats, those of other installed packages last."""
    from kvtax.records.formats import FORMATS

    added = [point.load() for point in entry_points(group=ENTRY_POINTS)]
    return [*FORMATS, *(form for package in added for form in package)]
