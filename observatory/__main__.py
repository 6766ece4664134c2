# SPDX-License-Identifier: Apache-2.0
"""Measure every connector on every release: configs/observatory.toml.

    python -m observatory [--release VERSION] [--connector CONFIG] [--again]

Cells that are there already are kept, so a run that was stopped goes on where it was.
Ends with docs/observatory.md, the page of all cells.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from lab.config import ConfigError, read_toml
from lab.paths import CONFIGS, REPOSITORY
from lab.records.documents import write_document, write_whole
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.errors import ServerError
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.releases import release as environment_of
from lab.serving.supervise import exit_on_signals
from observatory.axes import AXES
from observatory.cell import try_one
from observatory.page import page
from observatory.record import CellRecord, place

PAGE = REPOSITORY / "docs" / "observatory.md"


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured: each of `connectors` on each of `releases`."""

    releases: list[str]
    connectors: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m observatory")
    parser.add_argument("--release", action="append", metavar="VERSION")
    parser.add_argument("--connector", action="append", metavar="CONFIG")
    parser.add_argument(
        "--again", action="store_true", help="measure cells that are there already"
    )
    arguments = parser.parse_args()
    exit_on_signals()
    try:
        matrix = read_toml(CONFIGS / "observatory.toml", Matrix)
        with machine_lock():
            for release in arguments.release or matrix.releases:
                for connector in arguments.connector or matrix.connectors:
                    if arguments.again or not place(release, connector).exists():
                        _measure(release, connector)
        write_whole(PAGE, page(matrix.releases, matrix.connectors).encode())
    except (ConfigError, ServerError, MachineBusy) as error:
        print(f"observatory: {error}", file=sys.stderr)
        return 1
    print(f"observatory: {PAGE.relative_to(REPOSITORY)}")
    return 0


def _measure(release: str, connector: str) -> None:
    installed = environment_of(release)
    began_s = time.monotonic()
    found = try_one(load_connector(connector), installed)
    wall_s = time.monotonic() - began_s
    error = found.get("error")
    told = error.strip().splitlines()[-1] if error else "ok"
    print(f"vLLM {release}, {connector}: {told}, {wall_s:.0f} s", flush=True)
    record = CellRecord(
        release=release,
        connector=connector,
        provenance=provenance.collect(
            found.get("patches", {}), "python -m observatory", installed
        ),
        wall_s=round(wall_s, 1),
        levels={axis: list(told.levels) for axis, told in AXES.items()},
        medians_us=found.get("medians_us", {}),
        error=error,
    )
    file = place(release, connector)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_document(file, record)


if __name__ == "__main__":
    sys.exit(main())
