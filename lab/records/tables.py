# SPDX-License-Identifier: Apache-2.0
"""Write the tables of a Markdown page from the structs of this room.

    python -m lab.records.tables docs/records.md

A table stands between `<!-- fields of MODULE.STRUCT -->` and `<!-- end -->`. It has a
row per field: its name in the file, and the string that follows it in the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path

import msgspec

from lab.records.documents import write_whole

TABLE = re.compile(r"<!-- fields of (\w+)\.(\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the source says of each field of `kind`, inherited ones included."""
    found = {}
    for base in kind.__mro__[: kind.__mro__.index(msgspec.Struct)]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, after in itertools.pairwise(definition.body):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(name, " ".join(text.split()))
    return found


def table(kind: type[msgspec.Struct]) -> str:
    """A row per field of `kind`. Raises KeyError if a field has no description."""
    told = descriptions(kind)
    rows = [
        f"| `{written}` | {told[field]} |".replace("|cache|", r"\|cache\|")
        for field, written in zip(
            kind.__struct_fields__, kind.__struct_encode_fields__, strict=True
        )
    ]
    return "\n".join(["| field | meaning |", "|---|---|", *rows, ""])


def with_tables(page: str) -> str:
    """`page` with every table made anew."""

    def made(found: re.Match[str]) -> str:
        module, name = found.groups()
        kind = getattr(importlib.import_module(f"lab.records.{module}"), name)
        return f"<!-- fields of {module}.{name} -->\n{table(kind)}<!-- end -->\n"

    return TABLE.sub(made, page)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        write_whole(path, with_tables(path.read_text()).encode())


if __name__ == "__main__":
    main()
