# SPDX-License-Identifier: Apache-2.0
"""One connector on one release: what its calls take at each level of each axis.

The engine core runs in one process, with the release's own scheduler, block pool,
worker and connector, and the null model. HTTP has no part in the question.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import polars as pl

from lab.records.joined_steps import method_columns, read_worker_steps
from lab.records.observatory_cell import CellRecord, Passes
from lab.records.requests import PhaseStart
from lab.serving import provenance
from lab.serving.companion import accompanied
from lab.serving.connector import Connector
from lab.serving.engine_process import EngineProcess
from lab.serving.errors import ServerError
from lab.serving.installation import Installation
from lab.serving.releases import beside
from lab.serving.settings import CPU_ENGINE
from microbench.analysis.steps import read_engine_steps, step_table
from observatory.axes import AXES
from observatory.reasons import not_in_release, reason

# Every second pass goes down the levels, so that a drift of the machine falls out.
PASSES, FEWEST_PASSES = 9, 6
# After so long, the fewest will do: some connectors write every block that is computed.
LIMIT_S = 30.0
STEPS = 25
# Filled, and emptied before the next pass.
ONLY_UP = ("cache", "tier")
# What a busy machine does to single steps is left out. So is what a connector does in
# less than one step of ten: that is for the sweep to see.
SLOWEST = 0.1
# 4 requests of 131,072 tokens, and some more to fill the cache with.
SIZES = {"num_blocks": 36_000, "max_model_len": 132_096, "max_requests": 256}
RUNS_HERE = ("cpu_uniproc", "cpu_small_blocks")
# What the scheduler takes: of a cell without a connector, that is the figure.
SCHEDULER_US = pl.col("schedule_us") + pl.col("update_us")
PER_STEP = ("scheduler_us", "step_us", "connector_us")


def measure(
    name: str, release: str, connector: Connector, installed: Installation, command: str
) -> CellRecord:
    """The record of one cell, also if the engine does not start, or dies."""
    began_s = time.monotonic()
    means: Passes = {}
    hashes: dict[str, str] = {}
    error = not_in_release(connector, installed)
    if error is None:
        with tempfile.TemporaryDirectory(prefix="kvtax-cell-") as folder:
            try:
                means, hashes = run(connector, installed, Path(folder) / "cell")
            except (RuntimeError, ServerError) as failure:
                error = str(failure)
    return CellRecord(
        release=release,
        connector=name,
        provenance=provenance.collect(hashes, command, installed),
        wall_s=round(time.monotonic() - began_s, 1),
        levels={axis: list(told.levels) for axis, told in AXES.items()},
        means_us=means,
        error=error,
    )


def measured(
    name: str, release: str, connector: Connector, installed: Installation, command: str
) -> CellRecord:
    """As measure; an error is the reason alone, not the engine's log."""
    found = measure(name, release, connector, installed, command)
    if found.error:
        found = msgspec.structs.replace(found, error=reason(found.error))
    return found


def run(
    connector: Connector, installed: Installation, folder: Path
) -> tuple[Passes, dict[str, str]]:
    """The means, and the hashes of the patches.

    Raises RuntimeError with the end of the engine's log if it does not start, or dies,
    and ServerError if the connector's companion does not start.
    """
    folder.mkdir()
    with ExitStack() as stack:
        told = stack.enter_context(accompanied(connector, folder, installed))
        transfer = told.kv_transfer_config
        given = {
            "kv_transfer": transfer and CPU_ENGINE.kv_transfer_config | transfer,
            "sizes": SIZES | told.engine_args,
        }
        engine = stack.enter_context(
            EngineProcess(
                folder,
                "observatory.worker",
                [*connector.patches, *RUNS_HERE],
                json.dumps(given),
                recording=True,
                env=told.env,
                installed=installed,
                max_model_len=SIZES["max_model_len"],
                beside=beside(told.beside, installed),
            )
        )
        engine.wait_ready()
        axes = [axis for axis in AXES if axis != "tier" or engine.ask("has_tier")]
        ranges = []
        began_s = time.monotonic()
        for number in range(PASSES):
            if number >= FEWEST_PASSES and time.monotonic() - began_s > LIMIT_S:
                break
            for axis in axes:
                levels = engine.ask("ranges", axis, _in_order(axis, number), STEPS)
                ranges.append((axis, _down(axis, number), levels))
    steps = _read(folder / "records")
    found: Passes = {axis: {} for axis in axes}
    for axis, down, of_levels in ranges:
        upwards = of_levels[::-1] if down else of_levels
        for one, means in _means(steps, upwards).items():
            found[axis].setdefault(one, []).append(means)
    return found, engine.patch_hashes


def _down(axis: str, number: int) -> bool:
    return axis not in ONLY_UP and number % 2 == 1


def _in_order(axis: str, number: int) -> list[int]:
    levels = list(AXES[axis].levels)
    return levels[::-1] if _down(axis, number) else levels


def _read(records: Path) -> pl.DataFrame:
    whole = [PhaseStart(name="growth", start_ns=0, reset_ns=None)]
    steps = step_table(0, read_engine_steps(records, whole), read_worker_steps(records))
    return steps.with_columns(SCHEDULER_US.alias("scheduler_us"))


def _means(
    steps: pl.DataFrame, ranges: list[tuple[int, int]]
) -> dict[str, list[float]]:
    """By time, of each of `ranges` of step_id."""
    times = [*PER_STEP, *method_columns(steps)]
    found: dict[str, list[float]] = {one: [] for one in times}
    for first, end in ranges:
        own = steps.filter(pl.col("step_id").is_between(first, end, closed="left"))
        if own.height != end - first:
            raise RuntimeError(f"{own.height} records of {end - first} steps")
        kept = round(own.height * (1 - SLOWEST))
        for one in times:
            fastest = own[one].fill_null(0.0).sort().head(kept)
            found[one].append(round(float(fastest.mean()), 3))
    return found
