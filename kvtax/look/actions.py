# SPDX-License-Identifier: Apache-2.0
"""Actions of `kvtax look`: show records, count them, merge counts, watch servers."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtax.look.clients import read_clients
from kvtax.look.discover import common_clock, discover
from kvtax.look.instance_summary import summarise
from kvtax.look.instances import one_by_one
from kvtax.look.page import PageOfRecords
from kvtax.look.perfetto import TraceOfRecords, Window
from kvtax.look.tables import Together
from kvtax.look.text import instance_text, together_text, totals_text
from kvtax.look.totals import (
    StepTotals,
    merge_totals,
    read_totals,
    totals_of,
    write_totals,
)
from kvtax.records import RecordsError
from kvtax.records.files import write_whole
from kvtax.records.warning import RunWarning
from kvtax.report.render import warning_lines

# Kinds of warnings of what could not be read, or did not belong to its instance.
BAD_INPUT = {
    "unreadable",
    "requests_unreadable",
    "stacks_unreadable",
    "client_unreadable",
    "bad_lines",
    "another_life",
}


def show(
    folder: Path, out: Path, perfetto: Path | None, window: Window
) -> list[RunWarning]:
    """Print the tables of an instance, or several side by side; write page and trace.

    Returns all warnings. Raises RecordsError and OSError.
    """
    servers, warnings = discover(folder)
    clock, clients = common_clock(servers), read_clients(folder, servers)
    warnings += [*clock.warnings, *clients.warnings]
    page = PageOfRecords(folder, clock, len(servers))
    trace = TraceOfRecords(clock, window)
    all_warnings: list[RunWarning] = []
    last = None
    together = Together(servers, clock)
    for server, read in zip(servers, one_by_one(servers), strict=True):
        if isinstance(read, RunWarning):
            warnings.append(read)
            continue
        last = summary = summarise(clients.joined(read))
        page.add(server.engine, summary)
        together.add(summary)
        if perfetto:
            trace.add(read)
        all_warnings += [w.within(read.name) for w in read.warnings]
    if together.words:
        print(together_text(together))
    elif last:
        print(instance_text(last))
    shown = [*warnings, *(all_warnings if together.words else [])]
    print("\n".join([*warning_lines(shown), ""]))
    write_page(out, page.text(warnings, together))
    if perfetto:
        trace.write(perfetto)
        print(f"wrote {perfetto}: {trace.steps:,} steps, for ui.perfetto.dev")
    return [*warnings, *all_warnings]


def check_writable(file: Path, option: str) -> None:
    """Try to write beside `file`, before the work. Raises RecordsError."""
    try:
        if not file.exists():
            with tempfile.TemporaryFile(dir=file.parent):
                return
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_written(file, error, option) from None


def _not_written(file: Path, error: OSError, option: str) -> RecordsError:
    return RecordsError(f"{file}: {error.strerror}; name another file with {option}")


def write_page(out: Path, page: str) -> None:
    """Write the page. Raises RecordsError naming what to do where that cannot be."""
    try:
        write_whole(out, page.encode())
    except OSError as error:
        raise _not_written(out, error, "--out") from None


def count(folder: Path, host: str, summary: Path) -> list[RunWarning]:
    """Write the step counts of all servers below `folder`; return the warnings.

    `host` is put before the servers' names.
    """
    totals = totals_of(folder, host)
    write_totals(summary, totals)
    print("\n".join(warning_lines(totals.warnings)))
    _print_written(summary, totals)
    return totals.warnings


def merge(files: Sequence[Path], summary: Path | None) -> list[RunWarning]:
    """Print a table for each file of counts, and for all; write all as one file."""
    parts = {path.name: read_totals(path) for path in files}
    print(totals_text(parts))
    whole = merge_totals(parts.values())
    if summary:
        write_totals(summary, whole)
        _print_written(summary, whole)
    return whole.warnings


def _print_written(summary: Path, totals: StepTotals) -> None:
    print(f"wrote {summary}: {totals.steps:,} steps of {len(totals.servers)} servers")


def watch(folder: Path, address: str | None) -> None:
    """Show new records in the terminal, or serve them at `address`, until Ctrl-C."""
    # Imported here: rich and prometheus_client take longer to load than to be left out.
    from kvtax.look.live import Watched, follow
    from kvtax.look.prometheus import serve_for_ever

    watched = Watched(folder)
    where = f", http://{address}/metrics" if address else ""
    print(f"watching{where}; Ctrl-C ends it", flush=True)
    if address:
        serve_for_ever(watched, address)
    else:
        follow(watched)
