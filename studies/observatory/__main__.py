# SPDX-License-Identifier: Apache-2.0
"""Cells of a CPU build of vLLM, and of its Python sources on compiled parts.

A release without a CPU build is measured from its sources (`kvtax axes --vllm PATH`).
Here a release that has both is measured in both ways, and its build twice, as that
is what a difference of nothing looks like: three engines per connector, which are held
at the same levels in turn. A row is the ratio of whole steps, the median over an axis'
levels, as the median over the passes with its interval.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from kvtax.axes.cell import Measured
from kvtax.axes.cell import run as held
from kvtax.axes.matrix import SourcesRow
from kvtax.engine.connector import load_connector
from kvtax.engine.installation import Installation
from kvtax.engine.releases import on_sources, release, tested_releases
from kvtax.paths import REPOSITORY
from kvtax.proc.machine_lock import machine_lock
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, publish, rows_table

RELEASE = tested_releases()[-1]
SOURCES = REPOSITORY / "third_party" / f"vllm-{RELEASE}"
CONNECTORS = ("noop", "observatory/offloading", "mooncake_both_hash_sync")
AXES = ("running", "context", "arrivals")
# Enough for all passes, which a cell does without.
LIMIT_S = 200.0


COLUMNS = {
    "connector": "`{row.connector}`",
    "axis": "{row.axis}",
    "step, sources / build": "{row.sources_by_build:.3f}",
    "step, build / build": "{row.build_by_build:.3f}",
    "connector at the last level, build, µs": "{row.build_us:,.0f}",
    "sources, µs": "{row.sources_us:,.0f}",
}


def ratio(above: Measured, below: Measured, axis: str) -> Estimate:
    """Compute the ratio of steps: the median over the levels, by pass."""
    above_us, below_us = (
        np.array(measured.means_us[axis]["step_us"]) for measured in (above, below)
    )
    return Estimate.of(median_of_passes(np.median(above_us / below_us, axis=1)))


def connector_us(measured: Measured, axis: str) -> float:
    """Return the median over the passes at the axis' last level."""
    return float(np.median(np.array(measured.means_us[axis]["connector_us"])[:, -1]))


def compare(
    name: str, build: Installation, sources: Installation
) -> tuple[list[SourcesRow], dict[str, str]]:
    """Hold a connector on the build, again on it, and on the sources."""
    connector = load_connector(name)
    three = [(connector, installed) for installed in (build, build, sources)]
    with tempfile.TemporaryDirectory(prefix="kvtax-sources-") as folder:
        first, second, third = held(three, Path(folder), AXES, LIMIT_S)
    rows = [
        SourcesRow(
            name,
            axis,
            connector_us(first, axis),
            connector_us(third, axis),
            ratio(third, first, axis),
            ratio(second, first, axis),
        )
        for axis in AXES
    ]
    return rows, first.patch_hashes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.observatory`."""
    parser.add_argument("--only", action="append", choices=CONNECTORS)
    parser.add_argument(
        "--compiled",
        metavar="VERSION",
        default=RELEASE,
        help="release whose compiled parts and packages the sources use",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/observatory.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rows: list[SourcesRow] = []
    hashes: dict[str, str] = {}
    build, compiled = release(RELEASE), release(arguments.compiled)
    with machine_lock(), tempfile.TemporaryDirectory() as folder:
        sources = on_sources(SOURCES, compiled, Path(folder))
        for name in arguments.only or CONNECTORS:
            of_connector, used = compare(name, build, sources)
            rows += of_connector
            hashes |= used
        result = {"release": RELEASE, "compiled": arguments.compiled, "rows": rows}
        parts = [rows_table(rows, COLUMNS)]
        return publish("observatory", arguments.out, parts, result, hashes, sources)


if __name__ == "__main__":
    main("observatory", __doc__, configure, run)
