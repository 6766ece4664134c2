# SPDX-License-Identifier: Apache-2.0
"""Show what a connector costs a server, from the records that it wrote.

    kvtax look /records                             the answer, and a page
    kvtax look /records --perfetto trace.pb         each step, for ui.perfetto.dev
    kvtax look /records --prometheus 0.0.0.0:9109   new records, for Prometheus
    kvtax look --fields engine_step.jsonl           what a record's fields mean

DIR is the folder that KVTAX_STEP_RECORDS_DIR named, or a folder of such folders.
Records are only read; the server may be running. The exit code is 2 if a file or a line
of them could not be read; the rest is shown.
"""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path
from typing import NamedTuple

from kvtax.cli import Exit

# Name of the page beside the records, unlike that of any other command's.
PAGE = "look.html"
# Options that are instead of a page.
INSTEAD = ("prometheus", "bundle", "fields")


class Address(NamedTuple):
    """A host and port to listen at; an IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax look`."""
    parser.add_argument(
        "records", type=Path, nargs="?", metavar="DIR", help="a folder of records"
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
    instead = parser.add_argument_group(
        "instead of a page"
    ).add_mutually_exclusive_group()
    instead.add_argument(
        "--prometheus",
        type=_address,
        metavar="HOST:PORT",
        help="serve new records to Prometheus",
    )
    instead.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help="write the records to attach to an issue: without prompts, request ids, "
        "paths or names of hosts",
    )
    instead.add_argument(
        "--fields",
        nargs="?",
        const="",
        metavar="FILE",
        help="print what the fields of a file of records mean; without FILE, all files",
    )


def _address(text: str) -> Address:
    """Read an address, before records are read."""
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and int(port) <= 65_535:
        is_bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if is_bracketed else host
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            if not set(host) & set("[]:"):
                return Address(host, int(port))
        else:
            return Address(bare, int(port))
    raise argparse.ArgumentTypeError(
        f"{text}: HOST:PORT expected, such as 127.0.0.1:9109 or [::1]:9109"
    )


class LookError(Exception):
    """The arguments do not fit together."""

    exit_code = Exit.BAD_INPUT


def run(arguments: argparse.Namespace) -> int:
    """Look at the records; raises LookError, RecordsError and OSError."""
    instead = [name for name in INSTEAD if getattr(arguments, name) is not None]
    if instead and (arguments.out or arguments.perfetto):
        raise LookError(
            f"--{instead[0]} makes no page and no trace: leave --out and --perfetto out"
        )
    if arguments.fields is not None:
        from kvtax.cli.fields import print_fields

        print_fields(arguments.fields)
        return Exit.GOOD
    from kvtax.look import actions
    from kvtax.look.perfetto import Window
    from kvtax.report.render import visible, wrapped

    folder: Path | None = arguments.records
    if folder is None:
        raise LookError("give the folder of records: kvtax look DIR")
    if arguments.from_s > arguments.to_s:
        raise LookError(
            f"--from-s {arguments.from_s:g} is after --to-s {arguments.to_s:g}: "
            "give the earlier second first"
        )
    if arguments.prometheus:
        actions.serve(folder, *arguments.prometheus)
        return Exit.GOOD
    out = arguments.out or folder / PAGE
    for option in ("out", "perfetto", "bundle"):
        if file := getattr(arguments, option):
            actions.check_writable(file, f"--{option}")
    if arguments.bundle:
        warnings = actions.bundle(folder, arguments.bundle)
    else:
        window = Window(arguments.from_s, arguments.to_s)
        warnings = actions.show(folder, out, arguments.perfetto, window)
        print(
            *wrapped([f"wrote {visible(str(out))}: all tables, and each moment"]),
            sep="\n",
        )
    is_bad = any(warning.kind in actions.BAD_INPUT for warning in warnings)
    return Exit.BAD_INPUT if is_bad else Exit.GOOD
