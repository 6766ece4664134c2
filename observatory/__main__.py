# SPDX-License-Identifier: Apache-2.0
"""Measure every connector on every release: configs/observatory.toml.

    python -m observatory [--release VERSION] [--connector CONFIG] [--again]

Cells that are there already are kept, so a run that was stopped goes on where it was.
Ends with docs/observatory.md, the page of all cells, and the same for a browser.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from lab.config import ConfigError
from lab.paths import REPOSITORY
from lab.records import RecordsError
from lab.records.documents import write_whole
from lab.serving.connector import Connector, load_connector
from lab.serving.errors import ServerError
from lab.serving.installation import Installation
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.releases import release as environment_of
from lab.serving.supervise import exit_on_signals
from observatory.cell import measure
from observatory.matrix import read_matrix
from observatory.page import page
from observatory.reasons import reason
from observatory.results import place, read_cells
from page.build import build
from page.markdown import page_of

PAGE = REPOSITORY / "docs" / "observatory.md"
HTML = REPOSITORY / "docs" / "results" / "observatory" / "report.html"


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
        with machine_lock():
            for number, (release, connector) in enumerate(cells, 1):
                print(f"observatory: {number} of {len(cells)}: ", end="", flush=True)
                _measure(release, connector, configs[connector], installed[release])
        found = read_cells(matrix.releases, matrix.connectors)
        told = page(matrix, found)
        write_whole(PAGE, told.encode())
        write_whole(HTML, html(told).encode())
    except (ConfigError, RecordsError, ServerError, MachineBusy, OSError) as error:
        print(f"observatory: {error}", file=sys.stderr)
        return 1
    print(f"observatory: {PAGE.relative_to(REPOSITORY)}; open {HTML}")
    return 0


def html(text: str) -> str:
    """The page of all cells, for a browser."""
    return build(page_of(text, PAGE.parent, "Made by make observatory."))


def _measure(
    release: str, connector: str, config: Connector, installed: Installation
) -> None:
    found = measure(connector, release, config, installed, "python -m observatory")
    if found.error:
        found = msgspec.structs.replace(found, error=reason(found.error))
    told = found.error or "measured"
    print(f"vLLM {release}, {connector}: {told}, {found.wall_s:.0f} s", flush=True)
    file = place(release, connector)
    file.parent.mkdir(parents=True, exist_ok=True)
    # On one line: indented, the matrix would be ten megabytes.
    write_whole(file, msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
