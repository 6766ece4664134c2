# SPDX-License-Identifier: Apache-2.0
"""Compare two runs and keep limits: a cost gate for CI.

    python -m microbench.compare OLD NEW [--limits FILE] [--junit FILE]

OLD and NEW are per_config.json files, or folders with one. Prints Markdown. Exit
status: 0 if NEW keeps all limits; 1 if one is broken, or a verdict got worse than in
OLD; 2 if the files cannot be read, or were measured with different profiles. A limit
that the run cannot decide is named, and fails only where the limits file says
`undecided = "fail"`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.config import ConfigError
from lab.records import RecordsError
from lab.records.documents import write_whole
from lab.stats.junit import junit
from microbench.compare.comparable import NotComparable, require_same_profile
from microbench.compare.limits import LimitsFile, check_all, read_limits
from microbench.compare.numbers import read_results
from microbench.compare.text import markdown

KEPT, BROKEN, BAD_INPUT = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
    chosen = parser.parse_args(argv)
    try:
        old, new = read_results(chosen.old), read_results(chosen.new)
        require_same_profile(old, new)
        limits = LimitsFile()
        if chosen.limits:
            limits = read_limits(chosen.limits, old, new)
        checks = check_all(old, new, limits)
        if chosen.junit:
            write_whole(chosen.junit, junit(checks))
    except (RecordsError, ConfigError, NotComparable, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return BAD_INPUT
    print(markdown(old, new, checks))
    return BROKEN if any(check.fails for check in checks) else KEPT


if __name__ == "__main__":
    sys.exit(main())
