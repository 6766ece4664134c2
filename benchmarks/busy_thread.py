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

import msgspec
import numpy as np

from benchmarks.exposure import (
    FLOOR,
    FORWARD_US,
    QUANTILES,
    Bench,
    Cell,
    Measurement,
    by_cell,
    measure,
)
from benchmarks.results import configure_rounds, publish
from kvtax.engine.connector import load_connector
from kvtax.engine.settings import CPU_ENGINE
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.resampling import difference

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
        transfer = CPU_ENGINE.kv_transfer_config | connector.kv_transfer_config
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


def report(rows: list[GapRow]) -> list[str]:
    """Return the part of the page on a busy thread."""
    cells = [
        [
            str(row.ranks),
            f"{row.busy:.0%}",
            f"`{row.config}`",
            *(f"{us / 1e3:.2f}" for us in row.gap_us.values()),
            *(f"{us:+,.0f}" for us in row.added_us.values()),
        ]
        for row in rows
    ]
    head = ["ranks", "thread busy", "config", "gap between tokens p50, ms", "p99"]
    head += ["added to p50, µs", "added to p99"]
    note = (
        f"Asynchronous scheduling, a forward of {FORWARD_US / 1_000:g} ms, requests "
        f"all at once, {rows[0].rounds} rounds."
    )
    return [note, table(head, cells)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench busy_thread`."""
    configure_rounds(parser, "busy_thread", 8, minimum=2)
    parser.add_argument("--requests", type=int, default=24, help="per cell")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    amount = arguments.rounds, arguments.requests
    measured, hashes = measure(cells, FORWARD_US, *amount)
    rows = gap_rows(measured)
    return publish("busy_thread", arguments.out, report(rows), {"rows": rows}, hashes)
