# SPDX-License-Identifier: Apache-2.0
"""Command line, tables of rows and results with pages, shared by all studies.

A study is a folder with `__main__.py`, which measures and prints, and the result,
compressed; its page is a README of its own or a section of ours. `__main__` has
`configure(parser)`, `run(arguments)` and, if the page shows the result,
`figure(result)`, which `python -m studies` writes there.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvtax.engine.installation import Installation
from kvtax.report.markdown import table
from studies import results

STUDIES = Path(__file__).parent


def main(
    name: str,
    text: str | None,
    configure: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Run `python -m studies.NAME` and exit; an error for users has an exit code."""
    parser = argparse.ArgumentParser(
        f"python -m studies.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    configure(parser)
    try:
        sys.exit(run(parser.parse_args()))
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(code)


def rows_table(rows: Iterable[Any], columns: dict[str, str]) -> str:
    """Make a Markdown table; a column is a heading and a format of `row`."""
    body = [[text.format(row=row) for text in columns.values()] for row in rows]
    return table(list(columns), body)


def publish(
    name: str,
    out: Path,
    parts: list[str],
    result: dict[str, Any],
    patch_hashes: dict[str, str],
    installed: Installation | None = None,
) -> int:
    """Print and write a page and its JSON, as `studies.results.publish` does."""
    command = f"python -m studies.{name}"
    return results.publish(name, out, parts, result, patch_hashes, installed, command)


def committed(name: str, field: str, kind: Any, file: str = "result") -> Any:
    """Read a field of a study's committed result as `kind`."""
    content = gzip.decompress((STUDIES / name / f"{file}.json.gz").read_bytes())
    return msgspec.convert(msgspec.json.decode(content)[field], kind)
