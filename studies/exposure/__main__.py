# SPDX-License-Identifier: Apache-2.0
"""Connector work that users feel, beside the part that is found exposed.

A null device computes beside the host, so vLLM's asynchronous scheduling works as on a
GPU. Two questions:

- A known delay in one method after the other, at several loads, with and without
  asynchronous scheduling: is what kvtax.steps.critical_path finds exposed in that
  method what TPOT rises by?
- What do the hash walk, upstream's Mooncake and the fixed one add to TPOT and TTFT, at
  a full cache and several loads?

All cells of a round are measured in turn, in an order drawn anew. Differences are
within a round; intervals are 95 %, from resampling rounds. Prints Markdown and writes
it with JSON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
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
    METHODS,
    SHORT_FORWARD_US,
    Bench,
    Cell,
    Measurement,
    by_cell,
    measure,
)
from studies.harness import main, publish, rows_table
from studies.results import configure_rounds

LOADS = (0.25, 0.5, 0.9, 1.0)
DELAYS_US = (0.0, 200.0, 500.0, 1_000.0, 2_000.0)
MODES = ("sync", "async")
DELAYING = {
    "kv_connector": "DelayingConnector",
    "kv_connector_module_path": "studies.exposure.known_work",
    "kv_role": "kv_both",
}
CONFIGS = [FLOOR, "mooncake_both", "mooncake_both_hash_sync", "mooncake_both_fixed"]
RECORDING = ["step_timing_v2"]
# Share of a delay by which the exposed time and the rise of TPOT may differ.
WITHIN = 0.05


class CheckRow(msgspec.Struct):
    """Rise of TPOT with a delay, beside what is found exposed."""

    mode: str
    load: float
    method: str
    delay_us: float
    tpot_rose_us: Estimate
    exposed_us: Estimate
    exposed_less_tpot_us: Estimate
    share_of_delay: float


class CurveRow(msgspec.Struct):
    """Addition of a config to TPOT and TTFT, over the no-op connector."""

    mode: str
    load: float
    config: str
    tpot_us: float
    tpot_added_us: Estimate
    ttft_added_us: Estimate
    connector_exposed_us: float


def injected(bench: Bench) -> Iterator[tuple[Cell, str]]:
    """Yield cells with known delays, each with its engine."""
    for mode in MODES:
        engine = bench.start("delaying", mode, DELAYING, RECORDING)
        for load, method, delay_us in itertools.product(LOADS, METHODS, DELAYS_US):
            # Without a delay all methods are the same cell.
            if delay_us or method == next(iter(METHODS)):
                yield Cell(mode, load, method, delay_us), engine


def curves(bench: Bench) -> Iterator[tuple[Cell, str]]:
    """Yield cells of real connectors at a full cache, each with its engine."""
    for name, mode in itertools.product(CONFIGS, MODES):
        connector = load_connector(name)
        transfer = connector.kv_transfer_config
        transfer = transfer and CPU_ENGINE.kv_transfer_config | transfer
        engine = bench.start(name, mode, transfer, connector.patches)
        bench.fill(engine)
        for load in LOADS:
            yield Cell(mode, load, name), engine


def check_rows(
    measured: list[Measurement], methods: Mapping[str, str] = METHODS
) -> list[CheckRow]:
    """Compare the rise of TPOT with the exposed time, by mode, load, method, delay."""
    cells = by_cell(measured)
    rows = []
    for cell in sorted(cells):
        if not cell.delay_us:
            continue
        (base,) = (c for c in cells if c[:2] == cell[:2] and not c.delay_us)
        part = f"{methods[cell.what]}.{cell.what}_us"
        tpot_us, base_tpot_us = cells[cell]["tpot"], cells[base]["tpot"]
        exposed_us, base_us = cells[cell][part], cells[base][part]
        rose = difference(tpot_us, base_tpot_us)
        found = difference(exposed_us, base_us)
        missed = difference(exposed_us - base_us, tpot_us - base_tpot_us)
        rows.append(
            CheckRow(
                mode=cell.mode,
                load=cell.load,
                method=cell.what,
                delay_us=cell.delay_us,
                tpot_rose_us=Estimate.of(rose),
                exposed_us=Estimate.of(found),
                exposed_less_tpot_us=Estimate.of(missed),
                share_of_delay=(found.value - rose.value) / cell.delay_us,
            )
        )
    return rows


def curve_rows(measured: list[Measurement]) -> list[CurveRow]:
    """Compute additions to TPOT and TTFT over the no-op connector."""
    cells = by_cell(measured)
    rows = []
    for cell in sorted(cells):
        own, base = cells[cell], cells[cell._replace(what=FLOOR)]
        rows.append(
            CurveRow(
                *(cell.mode, cell.load, cell.what),
                float(np.median(own["tpot"])),
                Estimate.of(difference(own["tpot"], base["tpot"])),
                Estimate.of(difference(own["ttft"], base["ttft"])),
                float(np.median(own.get("connector_us", np.zeros(1)))),
            )
        )
    return rows


CHECK = {
    "scheduling": "{row.mode}",
    "load": "{row.load:.0%}",
    "method": "`{row.method}`",
    "delay µs": "{row.delay_us:,.0f}",
    "TPOT rose by µs": "{row.tpot_rose_us:+,.0f}",
    "found exposed µs": "{row.exposed_us:+,.0f}",
    "apart, of the delay": "{row.share_of_delay:+.1%}",
}
CURVE = {
    "config": "`{row.config}`",
    "scheduling": "{row.mode}",
    "load": "{row.load:.0%}",
    "TPOT µs": "{row.tpot_us:,.0f}",
    "added to TPOT µs": "{row.tpot_added_us:+,.0f}",
    "added to TTFT µs": "{row.ttft_added_us:+,.0f}",
    "connector's exposed µs per step": "{row.connector_exposed_us:,.0f}",
}


def check_text(rows: list[CheckRow]) -> list[str]:
    """Return the parts of the page on the check."""
    share = np.array([abs(row.share_of_delay) for row in rows])
    long = np.array([row.delay_us >= 1_000 for row in rows])
    note = (
        f"Found and felt are within {WITHIN:.0%} of the delay in "
        f"{int((share <= WITHIN).sum())} of {len(rows)} cells, and in "
        f"{int((share[long] <= WITHIN).sum())} of the {int(long.sum())} with a delay "
        f"of 1 ms or more; the median of the difference is {np.median(share):.1%}."
    )
    title = "## Is what `look` calls exposed what TPOT rises by?"
    return [title, note, rows_table(rows, CHECK)]


def curve_text(forward_us: int, rows: list[CurveRow]) -> list[str]:
    """Return the parts of the page on the additions with one forward time."""
    title = f"## What connectors add at a full cache, forward of {forward_us:,} µs"
    in_order = sorted(rows, key=lambda row: (row.config, row.mode))
    return [title, rows_table(in_order, CURVE)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.exposure`."""
    configure_rounds(parser, "exposure", 4, minimum=2)
    parser.add_argument("--requests", type=int, default=24, help="per cell, at 100 %%")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    amount = arguments.rounds, arguments.requests
    measured, hashes = measure(injected, FORWARD_US, *amount)
    check, added = check_rows(measured), {}
    parts = check_text(check)
    for forward_us in (FORWARD_US, SHORT_FORWARD_US):
        measured, used = measure(curves, forward_us, *amount)
        hashes |= used
        added[f"{forward_us} us"] = rows = curve_rows(measured)
        parts += curve_text(forward_us, rows)
    results = {"check": check, "curves": added}
    return publish("exposure", arguments.out, parts, results, hashes)


def figure(result: dict[str, Any]) -> str:
    """Return the curves of a result at 90 % load."""
    parts = []
    for forward, rows in result["curves"].items():
        rows = msgspec.convert(rows, list[CurveRow])
        at_load = [row for row in rows if row.load == 0.9]
        parts.append(f"Forward of {forward}:\n\n{rows_table(at_load, CURVE)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    main("exposure", __doc__, configure, run)
