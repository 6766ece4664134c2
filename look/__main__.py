# SPDX-License-Identifier: Apache-2.0
"""What a connector costs your server, from the records that it wrote.

    python -m look DIR [--out report.html] [--perfetto FILE [--from-s S] [--to-s S]]
    python -m look DIR --follow
    python -m look DIR --prometheus 127.0.0.1:9109

DIR is what KVTAX_STEP_RECORDS_DIR named, or a folder of such folders. Prints a table of
each instance and writes a page. Reads files only; the server may still be running.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.records import RecordsError
from lab.records.documents import write_whole
from lab.records.warning import RunWarning
from look.clients import read_clients
from look.clocks import one_clock
from look.follow import follow
from look.found import find
from look.instances import one_by_one
from look.live import Watched
from look.page import PageOfRecords
from look.perfetto import TraceOfRecords, Window
from look.prometheus import serve_for_ever
from look.text import text, warning_lines
from look.told import told_of

# As a shell says it of a program that SIGINT ended.
INTERRUPTED = 130


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
    parser.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write a trace as well, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--from-s",
        type=float,
        default=0.0,
        help="where the trace begins, in seconds since the first step",
    )
    parser.add_argument(
        "--to-s", type=float, default=1e9, help="where it ends (default: all)"
    )
    watching = parser.add_mutually_exclusive_group()
    watching.add_argument(
        "--follow", action="store_true", help="show in the terminal what comes now"
    )
    watching.add_argument(
        "--prometheus", metavar="HOST:PORT", help="serve what comes to Prometheus"
    )
    chosen = parser.parse_args(argv)
    try:
        if chosen.follow or chosen.prometheus:
            return watch(Watched(chosen.folder), chosen.prometheus)
        window = Window(chosen.from_s, chosen.to_s)
        look(chosen.folder, chosen.out, chosen.perfetto, window)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (RecordsError, OSError, ValueError) as error:
        print(f"look: {error}", file=sys.stderr)
        return 1
    return 0


def look(folder: Path, out: Path, perfetto: Path | None, window: Window) -> None:
    """Print a table of each instance, and write the page and, if asked for, a trace.

    Raises RecordsError and OSError.
    """
    found, warnings = find(folder)
    clock, clients = one_clock(found), read_clients(folder, found)
    warnings += [*clock.warnings, *clients.warnings]
    page, trace = (
        PageOfRecords(folder, clock, len(found)),
        TraceOfRecords(clock, window),
    )
    for read in one_by_one(found):
        if isinstance(read, RunWarning):
            warnings.append(read)
            continue
        told = told_of(clients.joined(read))
        print(text(told), end="\n\n")
        page.add(told)
        if perfetto:
            trace.add(read)
    print("\n".join(warning_lines(warnings)))
    write_whole(out, page.text(warnings).encode())
    print(f"wrote {out}")
    if perfetto:
        trace.write(perfetto)
        print(f"wrote {perfetto}, {trace.steps:,} steps, for ui.perfetto.dev")


def watch(watched: Watched, address: str | None) -> int:
    """Until Ctrl-C, which is the way to end it."""
    try:
        where = f", http://{address}/metrics" if address else ""
        print(f"watching{where}; Ctrl-C ends it", flush=True)
        if address:
            serve_for_ever(watched, address)
        else:
            follow(watched)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
