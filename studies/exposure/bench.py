# SPDX-License-Identifier: Apache-2.0
"""Engines on a null device, loaded in turn: the cells of exposure."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.engine.engine_process import EngineProcess
from kvtax.look.instances import read_instances
from kvtax.records.steps import only_life, read_device_steps
from kvtax.stats.distribution import Floats, as_float
from kvtax.steps.critical_path import exposed
from studies.results import turns

# The second is no longer than a slow host's work.
FORWARD_US, SHORT_FORWARD_US = 7_000, 2_000
# What a step takes besides, roughly; only to say what a load of 100 % is.
HOST_US = 1_500
MAX_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 48
# The side of each method that is delayed.
METHODS = {
    "build_connector_meta": "scheduler",
    "update_connector_output": "scheduler",
    "start_load_kv": "worker",
    "get_finished": "worker",
}
SIZES = {"num_blocks": 18_000, "max_requests": MAX_REQUESTS}
FULL_BLOCKS = 17_000
FLOOR = "noop"
QUANTILES = {"p50": 0.5, "p99": 0.99}


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
            "studies.exposure.worker",
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
            part.removeprefix("exposed."): as_float(own[part].mean())
            for part in own.columns
            if part.startswith("exposed.")
        }
        ttft_us, tpot_us = (1e3 * float(np.mean(ms)) for ms in (ttft_ms, tpot_ms))
        gap_us = {
            name: 1e3 * float(np.quantile(gaps_ms, q)) for name, q in QUANTILES.items()
        }
        measured.append(Measurement(cell, ttft_us, tpot_us, exposed_us, gap_us))
    return measured, bench.hashes


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
