# SPDX-License-Identifier: Apache-2.0
"""Actions of `kvtax look`: show records, watch servers, make a bundle for an issue."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from kvtax.look.clients import read_clients
from kvtax.look.discover import common_clock, discover
from kvtax.look.instance_summary import summarise
from kvtax.look.instances import each_instance
from kvtax.look.perfetto import TraceOfRecords, Window
from kvtax.look.servers import Servers
from kvtax.records import RecordsError
from kvtax.records.files import write_whole
from kvtax.records.warning import RunWarning, encodable
from kvtax.report import render
from kvtax.report.document import Page

# Kinds of warnings of what could not be read, or did not belong to its instance.
BAD_INPUT = {
    "unreadable",
    "requests_unreadable",
    "client_unreadable",
    "bad_lines",
    "another_life",
}


def show(
    folder: Path, out: Path, perfetto: Path | None, window: Window
) -> list[RunWarning]:
    """Print the answer for an instance, or several; write page and trace.

    Returns all warnings. Raises RecordsError and OSError.
    """
    files, warnings = discover(folder)
    clock, clients = common_clock(files), read_clients(folder, files)
    warnings += [*clock.warnings, *clients.warnings]
    servers, trace = Servers(clock), TraceOfRecords(clock, window)
    for read in each_instance(files):
        if isinstance(read, RunWarning):
            warnings.append(read)
            continue
        joined = clients.joined(read)
        servers.add(summarise(joined))
        if perfetto:
            trace.add(read)
        warnings += [warning.within(read.name) for warning in joined.warnings]
    warnings = once(warnings)
    page = Page(
        title=f"What the connector costs: {encodable(folder.resolve().name)}",
        question="",
        answer=servers.answer,
        warnings=warnings,
        sections=servers.page_sections,
        made=f"Made by kvtax look from {servers.count} "
        f"server{'s'[: servers.count != 1]}.",
    )
    print(_terminal(page, servers))
    write_page(out, render.html(page))
    if perfetto:
        trace.write(perfetto)
        name = render.visible(str(perfetto))
        print(f"wrote {name}: {trace.steps:,} steps, for ui.perfetto.dev")
    return warnings


def _terminal(page: Page, servers: Servers) -> str:
    return render.terminal(
        Page(
            title="",
            question="",
            answer=page.answer,
            warnings=page.warnings,
            sections=servers.terminal_sections,
            made="",
        )
    )


def once(warnings: list[RunWarning]) -> list[RunWarning]:
    """Name the places of equal warnings together."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for warning in warnings:
        key = (warning.kind, warning.message, warning.remedy)
        places.setdefault(key, []).append(warning.place)
    return [
        RunWarning(kind, _listed(where), message, remedy)
        for (kind, message, remedy), where in places.items()
    ]


def _listed(places: list[str]) -> str:
    first, *others = places
    return f"{first} and {len(others):,} more" if others else first


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


def serve(folder: Path, host: str, port: int) -> None:
    """Serve new records to Prometheus until Ctrl-C. Raises RecordsError and OSError."""
    # Imported here: prometheus_client takes longer to load than to be left out.
    from kvtax.look.live import Watched
    from kvtax.look.prometheus import serve_for_ever

    serve_for_ever(Watched(folder), host, port)


def bundle(folder: Path, out: Path) -> list[RunWarning]:
    """Write the records to attach to an issue; return what could not be read."""
    from kvtax.look.bundle import write_bundle

    servers, warnings = discover(folder)
    count = write_bundle(servers, out)
    print(
        f"wrote {render.visible(str(out))}: {count:,} lines of {len(servers):,} servers"
    )
    return warnings
