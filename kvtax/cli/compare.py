# SPDX-License-Identifier: Apache-2.0
"""Compare two sweeps and check limits: a cost gate for CI.

OLD and NEW are per_config.json files, or folders with one. Prints Markdown. Exit
code 1: a limit is broken, or a verdict is worse than in OLD. Exit code 2: the files
cannot be read, or hold runs of different profiles. A limit that the run cannot decide
is listed, and fails only if the limits file says `undecided = "fail"`.
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
    from kvtax.records import RecordsError
    from kvtax.records.files import write_whole
    from kvtax.verdict.aims import junit
    from kvtax.verdict.comparison import compare, markdown
    from kvtax.verdict.limits import read_limits
    from kvtax.verdict.run_changes import read_results

    for path in (arguments.old, arguments.new):
        if not path.exists():
            raise RecordsError(f"{path}: missing; give a per_config.json or its folder")
    old, new = read_results(arguments.old), read_results(arguments.new)
    limits = read_limits(arguments.limits) if arguments.limits else None
    checks = compare(old, new, limits)
    if arguments.junit:
        write_whole(arguments.junit, junit(checks))
    print(markdown(old, new, checks))
    return Exit.WORSE if any(check.fails for check in checks) else Exit.GOOD
