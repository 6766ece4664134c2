# SPDX-License-Identifier: Apache-2.0
"""Connector work that users feel, beside the part that `kvtax look` computes.

A null device computes beside the host, so vLLM's asynchronous scheduling works as on a
GPU. Two questions:

- A known delay in one method after the other, at several loads, with and without
  asynchronous scheduling: is what `look` calls exposed in that method what TPOT rises
  by?
- What do the hash walk, upstream's Mooncake and the fixed one add to TPOT and TTFT, at
  a full cache and several loads?

All cells of a round are measured in turn, in an order drawn anew. Differences are
within a round; intervals are 95 %, from resampling rounds. Prints Markdown and writes
it with JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from benchmarks.results import configure_rounds, publish, turns
from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import EngineProcess
from kvtax.engine.settings import CPU_ENGINE
from kvtax.look.critical_path import exposed
from kvtax.look.instances import read_instances
from kvtax.records.life import only_life
from kvtax.records.steps import read_device_steps
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import difference

# The second is no longer than a slow host's work.
FORWARD_US, SHORT_FORWARD_US = 7_000, 2_000
# What a step takes besides, roughly; only to say what a load of 100 % is.
HOST_US = 1_500
MAX_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 48
LOADS = (0.25, 0.5, 0.9, 1.0)
DELAYS_US = (0.0, 200.0, 500.0, 1_000.0, 2_000.0)
# The side of each method that is delayed.
METHODS = {
    "build_connector_meta": "scheduler",
    "update_connector_output": "scheduler",
    "start_load_kv": "worker",
    "get_finished": "worker",
}
MODES = ("sync", "async")
SIZES = {"num_blocks": 18_000, "max_requests": MAX_REQUESTS}
FULL_BLOCKS = 17_000
DELAYING = {
    "kv_connector": "DelayingConnector",
    "kv_connector_module_path": "benchmarks.exposure_connector",
    "kv_role": "kv_both",
}
FLOOR = "noop"
CONFIGS = [FLOOR, "mooncake_both", "mooncake_both_hash_sync", "mooncake_both_fixed"]
QUANTILES = {"p50": 0.5, "p99": 0.99}
RECORDING = ["step_timing_v2"]
# Share of a delay by which the exposed time and the rise of TPOT may differ.
WITHIN = 0.05


class Cell(NamedTuple):
    """A measured setting: `what` is a method that was delayed, or a config.

    `busy` is the share of the time in which a Python thread of the last of `ranks`
    computes.
    """

    mode: str
    load: float
    what: str
    delay_us: float = 0.0
    busy: float = 0.0
    ranks: int = 1


class Measurement(NamedTuple):
    """Means of one cell in one round: of its requests, and exposed us of its steps.

    `exposed_us` is by part of a step, `gap_us` the time between tokens by quantile.
    """

    cell: Cell
    ttft_us: float
    tpot_us: float
    exposed_us: Mapping[str, float]
    gap_us: Mapping[str, float] = {}


class CheckRow(msgspec.Struct):
    """Rise of TPOT with a delay, beside what `look` finds exposed."""

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


class Bench:
    """An engine per config, scheduling and number of ranks; one at a time is loaded."""

    def __init__(self, folder: Path, stack: ExitStack, forward_us: int) -> None:
        self._folder, self._stack = folder, stack
        self._forward_us = forward_us
        self._engines: dict[str, EngineProcess] = {}
        self.hashes: dict[str, str] = {}

    def start(
        self,
        name: str,
        mode: str,
        transfer: dict | None,
        patches: list[str],
        ranks: int = 1,
    ) -> str:
        """Start an engine, wait until it is ready and return its name."""
        engine = f"{name}-{mode}-{ranks}"
        arguments = SIZES | {"tensor_parallel_size": ranks}
        process = EngineProcess(
            self._folder / engine,
            "benchmarks.exposure_worker",
            patches,
            json.dumps({"kv_transfer": transfer, "arguments": arguments}),
            mode,
            recording=True,
            forward_us=self._forward_us,
        )
        self._engines[engine] = self._stack.enter_context(process)
        process.wait_ready()
        self.hashes |= process.patch_hashes
        return engine

    def fill(self, engine: str) -> None:
        """Fill the engine's cache."""
        self._engines[engine].ask("fill", FULL_BLOCKS)

    def load(self, engine: str, cell: Cell, requests: int, seed: int) -> tuple:
        """Load the engine; return first and end step, ms of TTFT, TPOT, token gaps."""
        capacity_rps = MAX_REQUESTS / OUTPUT_TOKENS * 1e6 / (self._forward_us + HOST_US)
        return self._engines[engine].ask(
            "load",
            {cell.what: cell.delay_us} if cell.what in METHODS else {},
            cell.busy,
            0.0 if cell.load == 1 else cell.load * capacity_rps,
            max(round(requests * cell.load), MAX_REQUESTS),
            PROMPT_TOKENS,
            OUTPUT_TOKENS,
            seed,
        )

    def exposed(self, engine: str) -> pl.DataFrame:
        """Read exposed us by step and part, once the engine has ended."""
        records = self._folder / engine / "records"
        ((instance,), _) = read_instances(records)
        device = read_device_steps(only_life(records) / "device_step.jsonl").records
        return exposed(instance.steps, device)


Plan = Callable[[Bench], Iterator[tuple[Cell, str]]]


def measure(
    plan: Plan, forward_us: int, rounds: int, requests: int
) -> tuple[list[Measurement], dict[str, str]]:
    """Measure every cell of `plan` once per round, in a round with the same arrivals.

    Returns the hashes of the patches as well.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-exposure-") as folder:
        with ExitStack() as stack:
            bench = Bench(Path(folder), stack, forward_us)
            cells = dict(plan(bench))
            loads = [
                (cell, bench.load(cells[cell], cell, requests, number))
                for number, cell in turns(cells, rounds)
            ]
        steps = {engine: bench.exposed(engine) for engine in set(cells.values())}
    measured = []
    for cell, (first_step, end_step, ttft_ms, tpot_ms, gaps_ms) in loads:
        own = steps[cells[cell]].filter(
            pl.col("step_id").is_between(first_step, end_step - 1)
        )
        exposed_us = {
            part.removeprefix("exposed."): float(own[part].mean() or 0)
            for part in own.columns
            if part.startswith("exposed.")
        }
        ttft_us, tpot_us = (1e3 * float(np.mean(ms)) for ms in (ttft_ms, tpot_ms))
        gap_us = {
            name: 1e3 * float(np.quantile(gaps_ms, q)) for name, q in QUANTILES.items()
        }
        measured.append(Measurement(cell, ttft_us, tpot_us, exposed_us, gap_us))
    return measured, bench.hashes


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
                *(cell.mode, cell.load, cell.what, cell.delay_us),
                *map(Estimate.of, (rose, found, missed)),
                (found.value - rose.value) / cell.delay_us,
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


def by_cell(measured: list[Measurement]) -> dict[Cell, dict[str, Floats]]:
    """Collect us by cell: `tpot`, `ttft`, gaps and exposed parts, each (rounds,)."""
    cells: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        times_us = {"tpot": one.tpot_us, "ttft": one.ttft_us}
        times_us |= {**one.exposed_us, **one.gap_us}
        for name, us in times_us.items():
            cells[one.cell][name].append(us)
    return {
        cell: {name: np.array(us) for name, us in times_us.items()}
        for cell, times_us in cells.items()
    }


def check_text(rows: list[CheckRow]) -> list[str]:
    """Return the parts of the page on the check."""
    cells = [
        [
            row.mode,
            f"{row.load:.0%}",
            f"`{row.method}`",
            f"{row.delay_us:,.0f}",
            f"{row.tpot_rose_us:+,.0f}",
            f"{row.exposed_us:+,.0f}",
            f"{row.share_of_delay:+.1%}",
        ]
        for row in rows
    ]
    head = ["scheduling", "load", "method", "delay µs", "TPOT rose by µs"]
    head += ["found exposed µs", "apart, of the delay"]
    share = np.array([abs(row.share_of_delay) for row in rows])
    long = np.array([row.delay_us >= 1_000 for row in rows])
    note = (
        f"Found and felt are within {WITHIN:.0%} of the delay in "
        f"{int((share <= WITHIN).sum())} of {len(rows)} cells, and in "
        f"{int((share[long] <= WITHIN).sum())} of the {int(long.sum())} with a delay "
        f"of 1 ms or more; the median of the difference is {np.median(share):.1%}."
    )
    title = "## Is what `look` calls exposed what TPOT rises by?"
    return [title, note, table(head, cells)]


def curve_text(forward_us: int, rows: list[CurveRow]) -> list[str]:
    """Return the parts of the page on the additions with one forward time."""
    cells = [
        [
            f"`{row.config}`",
            row.mode,
            f"{row.load:.0%}",
            f"{row.tpot_us / 1e3:.2f}",
            f"{row.tpot_added_us:+,.0f}",
            f"{row.ttft_added_us:+,.0f}",
            f"{row.connector_exposed_us:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row.config, row.mode))
    ]
    head = ["config", "scheduling", "load", "TPOT ms", "added to TPOT µs"]
    head += ["added to TTFT µs", "connector's exposed µs per step"]
    forward_ms = forward_us / 1_000
    title = f"## What connectors add at a full cache, forward of {forward_ms:g} ms"
    return [title, table(head, cells)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench exposure`."""
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
