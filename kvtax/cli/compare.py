# SPDX-License-Identifier: Apache-2.0
"""Compare two sweeps or two gates, and check limits: a cost gate for CI.

OLD and NEW are per_config.json files of sweeps, or folders with one, or cells of
`kvtax gate --out`. Prints Markdown. Exit code 1: a limit is broken, a verdict is worse
than in OLD, or a cost is certainly higher. Exit code 2: the files cannot be read, or
hold different things. A limit that the run cannot decide is listed, and fails only if
the limits file says `undecided = "fail"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtax.cli.options import add_limits


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax compare`."""
    parser.add_argument("old", type=Path, metavar="OLD", help="the run to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="the run to judge")
    add_limits(parser, "limits, such as configs/limits/ci.toml")


def run(arguments: argparse.Namespace) -> int:
    """Compare the runs. Raises RecordsError, ConfigError, NotComparable, OSError."""
    from kvtax.cli import Exit
    from kvtax.records.files import read_document, schema_in, schema_of, write_whole
    from kvtax.records.observatory_cell import CellRecord
    from kvtax.records.per_config import PerConfig
    from kvtax.report.render import visible
    from kvtax.verdict.bounds import junit
    from kvtax.verdict.changes import NotComparable, compare_gates, compare_sweeps
    from kvtax.verdict.comparison import markdown
    from kvtax.verdict.limits import read_limits

    paths = [
        path / "per_config.json" if path.is_dir() else path
        for path in (arguments.old, arguments.new)
    ]
    limits = read_limits(arguments.limits) if arguments.limits else None
    gates = [schema_in(path) == schema_of(CellRecord) for path in paths]
    if gates[0] != gates[1]:
        raise NotComparable("OLD and NEW are a sweep and a gate: give two of a kind")
    if all(gates):
        old_cell, new_cell = (read_document(path, CellRecord) for path in paths)
        comparison = compare_gates(old_cell, new_cell, limits)
    else:
        old, new = (read_document(path, PerConfig) for path in paths)
        comparison = compare_sweeps(old, new, limits)
    if arguments.junit:
        write_whole(arguments.junit, junit(comparison.checks))
    print("\n".join(map(visible, markdown(comparison).split("\n"))))
    worse = any(check.fails for check in comparison.checks)
    return Exit.WORSE if worse else Exit.GOOD
