# SPDX-License-Identifier: Apache-2.0
"""What a connector costs your server, from the records that it wrote.

    python -m look DIR [--out report.html]

DIR is what KVTAX_STEP_RECORDS_DIR named, or a folder of such folders. Prints a table of
each instance and writes a page. Reads files only; the server may still be running.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.records import RecordsError
from lab.records.documents import write_whole
from look.instances import read_instances
from look.page import page
from look.text import text, warning_lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 1 with a message when there is nothing to look at."""
    parser = argparse.ArgumentParser(
        prog="python -m look",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the records")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="where the page goes (default: report.html)",
    )
    chosen = parser.parse_args(argv)
    try:
        instances, warnings = read_instances(chosen.folder)
        print("\n\n".join(text(one) for one in instances))
        print("\n".join(warning_lines(warnings)))
        write_whole(chosen.out, page(chosen.folder, instances, warnings).encode())
    except (RecordsError, OSError) as error:
        print(f"look: {error}", file=sys.stderr)
        return 1
    print(f"wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
