# SPDX-License-Identifier: Apache-2.0
"""The records of a host's servers as a small file, to be merged with other hosts'.

    python -m look.reduce DIR --out FILE

DIR is as for python -m look. python -m look.merge FILE... shows what is in such files.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from lab.records import RecordsError
from look.summed import summed, write_summed
from look.text import warning_lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 with a message when there is nothing to look at."""
    parser = argparse.ArgumentParser(
        prog="python -m look.reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the records")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--host",
        default=platform.node(),
        help="what the host is called (default: its name)",
    )
    chosen = parser.parse_args(argv)
    try:
        one = summed(chosen.folder, chosen.host)
        write_summed(chosen.out, one)
    except (RecordsError, OSError) as error:
        print(f"look.reduce: {error}", file=sys.stderr)
        return 1
    print("\n".join(warning_lines(one.warnings)))
    print(f"wrote {chosen.out}: {one.steps:,} steps of {len(one.servers)} servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
