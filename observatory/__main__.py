# SPDX-License-Identifier: Apache-2.0
"""Measure every connector on every release: configs/observatory.toml.

    python -m observatory [--release VERSION] [--connector CONFIG] [--again]
        [--ray ADDRESS]

Cells that are there already are kept, so a run that was stopped goes on where it was.
Ends with docs/observatory.md, the page of all cells, and the same for a browser.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import msgspec

from lab.config import ConfigError
from lab.hosts.errors import HostsError
from lab.paths import REPOSITORY
from lab.records import RecordsError
from lab.records.documents import write_whole
from lab.records.observatory_cell import CellRecord
from lab.serving.connector import Connector, load_connector
from lab.serving.errors import ServerError
from lab.serving.installation import Installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.releases import release as environment_of
from lab.serving.supervise import exit_on_signals
from observatory.cell import measured
from observatory.matrix import Matrix, read_matrix
from observatory.page import page
from observatory.results import place, read_cells
from page.build import build
from page.markdown import page_of

COMMAND = "python -m observatory"
PAGE = REPOSITORY / "docs" / "observatory.md"
HTML = REPOSITORY / "docs" / "results" / "observatory" / "report.html"

Cells = list[tuple[str, str]]
ERRORS = (
    ConfigError,
    HostsError,
    MachineBusy,
    RecordsError,
    ServerError,
    OSError,
)


def main() -> int:
    """0, or 1 if something stopped it."""
    parser = argparse.ArgumentParser(
        prog="python -m observatory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--release", action="append", metavar="VERSION")
    parser.add_argument("--connector", action="append", metavar="CONFIG")
    parser.add_argument(
        "--again", action="store_true", help="measure cells that are there already"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="measure on all hosts of a Ray cluster (docs/hosts.md); auto: this one's",
    )
    chosen = parser.parse_args()
    exit_on_signals()
    try:
        matrix = read_matrix()
        cells = [
            (release, connector)
            for release in chosen.release or matrix.releases
            for connector in chosen.connector or matrix.connectors
            if chosen.again or not place(release, connector).exists()
        ]
        # All at once, so that what is not there is said before an hour of measuring.
        configs = {connector: load_connector(connector) for _, connector in cells}
        installed = {release: environment_of(release) for release, _ in cells}
        if chosen.ray is None:
            made = _measure_here(cells, configs, installed)
        else:
            made = _on_hosts(chosen.ray, cells, matrix, installed)
        for number, cell in enumerate(made, 1):
            print(f"observatory: {number} of {len(cells)}: {_line(cell)}", flush=True)
            _keep(cell)
        found = read_cells(matrix.releases, matrix.connectors)
        told = page(matrix, found)
        write_whole(PAGE, told.encode())
        write_whole(HTML, html(told).encode())
    except ERRORS as error:
        print(f"observatory: {error}", file=sys.stderr)
        return 1
    print(f"observatory: {PAGE.relative_to(REPOSITORY)}; open {HTML}")
    return 0


def html(text: str) -> str:
    """The page of all cells, for a browser."""
    return build(page_of(text, PAGE.parent, "Made by make observatory."))


def _measure_here(
    cells: Cells, configs: dict[str, Connector], installed: dict[str, Installation]
) -> Iterator[CellRecord]:
    with machine_lock():
        for release, connector in cells:
            config, release_of = configs[connector], installed[release]
            yield measured(connector, release, config, release_of, COMMAND)


def _on_hosts(
    address: str, cells: Cells, matrix: Matrix, installed: dict[str, Installation]
) -> Iterator[CellRecord]:
    # Ray takes a second to import, and is needed here alone.
    from observatory.on_hosts import measure_on_hosts

    return measure_on_hosts(address, cells, matrix.claims, installed)


def _line(cell: CellRecord) -> str:
    where = f" on {cell.host}" if cell.host else ""
    told = cell.error or "measured"
    return f"vLLM {cell.release}, {cell.connector}{where}: {told}, {cell.wall_s:.0f} s"


def _keep(cell: CellRecord) -> None:
    file = place(cell.release, cell.connector)
    file.parent.mkdir(parents=True, exist_ok=True)
    # On one line: indented, the matrix would be ten megabytes.
    write_whole(file, msgspec.json.encode(cell) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
