# SPDX-License-Identifier: Apache-2.0
"""Steps of all releases over a no-op connector's, in one go.

    python -m studies.observatory.releases     # a minute a release; again to go on

On each release three engines take turns at each number of running requests: one with a
no-op connector, one without a connector, and MooncakeConnector. A row is the ratio of
whole steps, at one and at 256 running requests, the median over the passes with its
interval. A release that is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from kvtax.axes.cell import Measured
from kvtax.axes.cell import run as held
from kvtax.axes.matrix import RELEASES, Choice, ReleaseRow, read_releases
from kvtax.engine import provenance
from kvtax.engine.connector import load_connector
from kvtax.engine.installation import Installation
from kvtax.engine.releases import known_releases, tested_releases
from kvtax.paths import REPOSITORY
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import write_document
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, rows_table

NOOP = "noop"
CONNECTORS = (NOOP, "plain", "mooncake_both")
AXIS = "running"
# Fewer passes after so many seconds.
LIMIT_S = 30.0
COLUMNS = {
    "release": "{row.release}",
    "connector": "`{row.connector}`",
    "step over a no-op's, 1 running": "{row.first:.2f}",
    "256 running": "{row.last:.2f}",
}


def measure(release: str, installed: Installation) -> list[ReleaseRow]:
    """Hold the engines of one release in turn; return a row of each but the no-op's."""
    engines = [(load_connector(name), installed) for name in CONNECTORS]
    with tempfile.TemporaryDirectory(prefix="kvtax-releases-") as folder:
        noop, *others = held(engines, Path(folder), (AXIS,), LIMIT_S)
    command = "python -m studies.observatory.releases"
    return [
        ReleaseRow(
            release,
            name,
            ratio(own, noop, 0),
            ratio(own, noop, -1),
            provenance.collect(own.patch_hashes, command, installed),
        )
        for name, own in zip(CONNECTORS[1:], others, strict=True)
    ]


def ratio(own: Measured, noop: Measured, level: int) -> Estimate:
    """Compare whole steps at one level, pass by pass."""
    above, below = (
        np.array(measured.means_us[AXIS]["step_us"])[:, level]
        for measured in (own, noop)
    )
    return Estimate.of(median_of_passes(above / below))


def choice_of(release: str) -> Choice:
    """Return how a release is installed: its CPU build, or its sources."""
    if release in tested_releases():
        return Choice(releases=[release])
    return Choice(vllm=REPOSITORY / "third_party" / f"vllm-{release}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.observatory.releases`."""
    parser.add_argument("--release", action="append", choices=known_releases())
    parser.add_argument("--out", type=Path, default=RELEASES)


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing, keep it release by release; return the exit code."""
    rows = read_releases(arguments.out)
    with machine_lock():
        for release in arguments.release or known_releases():
            if any(row.release == release for row in rows):
                continue
            with choice_of(release).installed([release]) as by_release:
                rows += measure(release, by_release[release])
            order = known_releases()
            rows.sort(key=lambda row: order.index(row.release))
            write_document(arguments.out, {"rows": rows})
            print(rows_table(rows, COLUMNS), flush=True)
    return 0


if __name__ == "__main__":
    main("observatory.releases", __doc__, configure, run)
