# SPDX-License-Identifier: Apache-2.0
"""Show what a connector costs a server, from the records that it wrote.

    kvtax look /records                                a table per instance, and a page
    kvtax look /records --follow                       new records in the terminal
    kvtax look /records --summary host1.parquet        counts of this host's steps
    kvtax look host1.parquet host2.parquet             tables of merged counts

DIR is the folder that KVTAX_STEP_RECORDS_DIR named, or a folder of such folders.
Records are only read; the server may be running. The exit code is 2 if a file or a line
of them could not be read; the rest is shown.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from kvtax.cli import Exit

# Name of the page beside the records, unlike that of any other command's.
PAGE = "look.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax look`."""
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="DIR|SUMMARY",
        help="one folder of records, or files that --summary wrote",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file of the page (default: DIR/{PAGE})",
    )
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a Perfetto trace"
    )
    trace.add_argument(
        "--from-s",
        type=float,
        default=0.0,
        help="start of the trace, seconds after the first step (default: 0)",
    )
    trace.add_argument(
        "--to-s", type=float, default=1e9, help="end of the trace (default: the end)"
    )
    live = parser.add_argument_group("running servers").add_mutually_exclusive_group()
    live.add_argument(
        "--follow", action="store_true", help="show new records in the terminal"
    )
    live.add_argument(
        "--prometheus",
        type=_address,
        metavar="HOST:PORT",
        help="serve new records to Prometheus",
    )
    hosts = parser.add_argument_group("many hosts")
    hosts.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help="write counts of steps, a few MB, in place of a page; they can be merged",
    )
    hosts.add_argument(
        "--host",
        default=platform.node(),
        metavar="NAME",
        help="name of this host in a summary (default: its own)",
    )


def _address(text: str) -> str:
    """Check an address, before records are read."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(
            f"{text}: HOST:PORT expected, such as 127.0.0.1:9109"
        )
    return text


class LookError(Exception):
    """The arguments do not fit together."""

    exit_code = Exit.BAD_INPUT


def run(arguments: argparse.Namespace) -> int:
    """Look at the records; raises LookError, RecordsError and OSError."""
    from kvtax.look import actions
    from kvtax.look.perfetto import Window
    from kvtax.report.render import visible

    first, *others = arguments.records
    if arguments.from_s > arguments.to_s:
        raise LookError(
            f"--from-s {arguments.from_s:g} is after --to-s {arguments.to_s:g}: "
            "give the earlier second first"
        )
    watching = arguments.follow or arguments.prometheus
    if not first.is_file() and others:
        raise LookError(f"{others[0]}: give one folder of records, or only summaries")
    if first.is_file() and (watching or arguments.perfetto):
        raise LookError(f"{first}: is a file; a trace or a live view needs DIR")
    if watching:
        actions.watch(first, arguments.prometheus)
        return Exit.GOOD
    if first.is_file():
        warnings = actions.merge(arguments.records, arguments.summary)
    elif arguments.summary:
        warnings = actions.count(first, arguments.host, arguments.summary)
    else:
        window = Window(arguments.from_s, arguments.to_s)
        out = arguments.out or first / PAGE
        for option in ("out", "perfetto"):
            if file := getattr(arguments, option):
                actions.check_writable(file, f"--{option}")
        warnings = actions.show(first, out, arguments.perfetto, window)
        print(f"wrote {visible(str(out))}: all tables, and each moment")
    is_bad = any(warning.kind in actions.BAD_INPUT for warning in warnings)
    return Exit.BAD_INPUT if is_bad else Exit.GOOD
