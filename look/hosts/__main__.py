# SPDX-License-Identifier: Apache-2.0
"""What servers of many hosts cost, without moving their records.

    python -m look.hosts ADDRESS DIR [--out FILE]

ADDRESS is that of a Ray cluster, or auto. Each host reads the folder DIR of its own, as
python -m look.reduce does; what it counted comes here. Prints a table for each host,
and one for all. Hosts without records are named and left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.hosts.errors import HostsError
from lab.hosts.everywhere import everywhere
from lab.records import RecordsError
from lab.serving.supervise import exit_on_signals
from look.merge import merged_text
from look.summed import Summed, summed, together, write_summed


def main() -> int:
    """Exit status 0; 1 with a message if no host or not each of them has records."""
    parser = argparse.ArgumentParser(
        prog="python -m look.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="ADDRESS")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="all hosts' counts")
    chosen = parser.parse_args()
    exit_on_signals()
    parts: dict[str, Summed] = {}
    missing = 0
    try:
        for host, found in everywhere(chosen.address, summed, chosen.folder):
            if isinstance(found, Exception):
                print(f"left out {host}: {found}", file=sys.stderr)
                missing += 1
            else:
                parts[host] = found
        if parts:
            print(merged_text(dict(sorted(parts.items()))))
            if chosen.out:
                write_summed(chosen.out, together(parts.values()))
    except (HostsError, RecordsError, OSError) as error:
        print(f"look.hosts: {error}", file=sys.stderr)
        return 1
    return int(missing > 0 or not parts)


if __name__ == "__main__":
    sys.exit(main())
