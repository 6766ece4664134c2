# SPDX-License-Identifier: Apache-2.0
"""Gaps between tokens where a Python thread of a worker's process is busy.

Each of Mooncake's waits for an event loop is then a wait for the GIL as well, which
takes the interpreter's switch interval, 5 ms. Upstream's connector and the fixed one
run beside the no-op connector on a null device that computes beside the host, with
asynchronous scheduling, as on a GPU: with one rank, in the engine's process, and with
two in processes of their own, of which the second has the thread. The thread computes
always, or half of the time. All cells of a round are measured in turn, in an
order drawn anew; intervals are 95 %, from resampling rounds. Prints Markdown and writes
it with JSON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvtax.engine.connector import load_connector
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.stats import Estimate
from kvtax.stats.resampling import difference
from studies.exposure.bench import (
    FLOOR,
    FORWARD_US,
    QUANTILES,
    Bench,
    Cell,
    Measurement,
    by_cell,
    measure,
)
from studies.harness import main, publish, rows_table
from studies.results import configure_rounds

CONFIGS = [FLOOR, "mooncake_both", "mooncake_both_fixed"]
RANKS = (1, 2)
BUSY = (0.0, 0.5, 1.0)


class GapRow(msgspec.Struct):
    """Gaps between a config's tokens by quantile, and what it adds to the no-op's."""

    ranks: int
    busy: float
    config: str
    rounds: int
    gap_us: dict[str, float]
    added_us: dict[str, Estimate]


def cells(bench: Bench) -> Iterator[tuple[Cell, str]]:
    """Yield cells at full load, without and with a busy thread, and their engine."""
    for ranks, name in itertools.product(RANKS, CONFIGS):
        connector = load_connector(name)
        own = connector.kv_transfer_config or {}
        transfer = CPU_ENGINE.kv_transfer_config | own
        engine = bench.start(name, "async", transfer, connector.patches, ranks)
        for busy in BUSY:
            yield Cell("async", 1.0, name, busy=busy, ranks=ranks), engine


def gap_rows(measured: list[Measurement]) -> list[GapRow]:
    """Compute the gaps between tokens, and additions over the no-op connector."""
    samples = by_cell(measured)
    rows = []
    for cell in sorted(samples, key=lambda cell: (cell.ranks, cell.busy, cell.what)):
        own, base = samples[cell], samples[cell._replace(what=FLOOR)]
        of_quantiles = [
            (
                float(np.median(own[name])),
                Estimate.of(difference(own[name], base[name])),
            )
            for name in QUANTILES
        ]
        levels, added = zip(*of_quantiles, strict=True)
        rows.append(
            GapRow(
                cell.ranks,
                cell.busy,
                cell.what,
                len(own["p50"]),
                dict(zip(QUANTILES, levels, strict=True)),
                dict(zip(QUANTILES, added, strict=True)),
            )
        )
    return rows


COLUMNS = {
    "ranks": "{row.ranks}",
    "thread busy": "{row.busy:.0%}",
    "config": "`{row.config}`",
    "gap between tokens p50, µs": "{row.gap_us[p50]:,.0f}",
    "p99": "{row.gap_us[p99]:,.0f}",
    "added to p50, µs": "{row.added_us[p50]:+,.0f}",
    "added to p99": "{row.added_us[p99]:+,.0f}",
}


def report(rows: list[GapRow]) -> list[str]:
    """Return the part of the page on a busy thread."""
    note = (
        f"Asynchronous scheduling, a forward of {FORWARD_US / 1_000:g} ms, requests "
        f"all at once, {rows[0].rounds} rounds."
    )
    return [note, rows_table(rows, COLUMNS)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.busy_thread`."""
    configure_rounds(parser, "busy_thread", 8, minimum=2)
    parser.add_argument("--requests", type=int, default=24, help="per cell")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    amount = arguments.rounds, arguments.requests
    measured, hashes = measure(cells, FORWARD_US, *amount)
    rows = gap_rows(measured)
    return publish("busy_thread", arguments.out, report(rows), {"rows": rows}, hashes)


def figure(result: dict[str, Any]) -> str:
    """Return the table of a result, of the thread that never rests."""
    rows = msgspec.convert(result["rows"], list[GapRow])
    return rows_table([row for row in rows if row.busy == 1], COLUMNS)


if __name__ == "__main__":
    main("busy_thread", __doc__, configure, run)
