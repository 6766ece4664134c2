# SPDX-License-Identifier: Apache-2.0
"""Write the tables of a Markdown page from the structs of this room.

    python -m kvtax.records.tables docs/records.md

A table stands between `<!-- fields of MODULE.STRUCT -->` and `<!-- end -->`, with the
module's full name if it is of another room. It has a row per field: its name in the
file, and the string that follows it in the source.
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
from typing import get_args, get_type_hints

import msgspec

from kvtax.records.files import write_whole
from kvtax.records.steps import Measured

TABLE = re.compile(r"<!-- fields of ([\w.]+)\.(\w+) -->\n.*?<!-- end -->\n", re.DOTALL)


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Read the description of each field of `kind`, inherited ones included."""
    texts: dict[str, str] = {}
    for base in kind.__mro__[: kind.__mro__.index(msgspec.Struct)]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in itertools.pairwise(definition.body):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts.setdefault(name, " ".join(text.split()))
    return texts


def table(kind: type[msgspec.Struct]) -> str:
    """Make a row per field of `kind`. Raises KeyError if a field has no description."""
    texts = descriptions(kind)
    hints = get_type_hints(kind, include_extras=True)
    measured = {
        name: notes[0]
        for name, hint in hints.items()
        if (notes := [n for n in get_args(hint)[1:] if isinstance(n, Measured)])
    }
    lines = ["| field | meaning |", "|---|---|"]
    if measured:
        lines = ["| field | unit | since | meaning |", "|---|---|---|---|"]
    for field, written in zip(
        kind.__struct_fields__, kind.__struct_encode_fields__, strict=True
    ):
        facts = f" {' | '.join(measured[field])} |" if measured else ""
        text = texts[field].replace("|cache|", r"\|cache\|")
        lines.append(f"| `{written}` |{facts} {text} |")
    return "\n".join([*lines, ""])


def with_tables(page: str) -> str:
    """`page` with every table made anew."""

    def made(found: re.Match[str]) -> str:
        module, name = found.groups()
        full = module if "." in module else f"kvtax.records.{module}"
        kind = getattr(importlib.import_module(full), name)
        return f"<!-- fields of {module}.{name} -->\n{table(kind)}<!-- end -->\n"

    return TABLE.sub(made, page)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        write_whole(path, with_tables(path.read_text()).encode())


if __name__ == "__main__":
    main()
