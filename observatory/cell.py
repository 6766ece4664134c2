# SPDX-License-Identifier: Apache-2.0
"""One connector on one release: what its calls take at each level of each axis.

The engine core runs in one process, with the release's own scheduler, block pool,
worker and connector, and the null model. HTTP has no part in the question.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from lab.records.requests import PhaseStart
from lab.serving.connector import Connector
from lab.serving.engine_process import EngineProcess
from lab.serving.installation import Installation
from lab.serving.settings import CPU_ENGINE
from microbench.analysis.steps import (
    method_columns,
    read_engine_steps,
    read_worker_steps,
    step_table,
)
from observatory.axes import AXES

# Every second pass goes down the levels, so that a drift of the machine falls out.
PASSES = 6
STEPS = 40
# 4 requests of 131,072 tokens, and some more to fill the cache with.
SIZES = {"num_blocks": 36_000, "max_model_len": 132_096, "max_requests": 256}
RUNS_HERE = ("cpu_uniproc", "cpu_small_blocks")
PER_STEP = ("schedule_us", "step_us", "connector_us")

# By axis and time, a list of passes of medians in us, one per level.
Medians = dict[str, dict[str, list[list[float]]]]


def measure(
    connector: Connector, installed: Installation, folder: Path
) -> tuple[Medians, dict[str, str]]:
    """The medians, and the hashes of the patches.

    Raises RuntimeError with the end of the engine's log if it does not start, or dies.
    """
    told = connector.kv_transfer_config
    given = {
        "kv_transfer": told and CPU_ENGINE.kv_transfer_config | told,
        "sizes": SIZES,
    }
    with EngineProcess(
        folder,
        "observatory.worker",
        [*connector.patches, *RUNS_HERE],
        json.dumps(given),
        recording=True,
        env=connector.env,
        installed=installed,
        max_model_len=SIZES["max_model_len"],
    ) as engine:
        engine.wait_ready()
        ranges = [
            (axis, number, engine.ask("ranges", axis, _order(axis, number), STEPS))
            for number in range(PASSES)
            for axis in AXES
        ]
    steps = _read(folder / "records")
    found: Medians = {axis: {} for axis in AXES}
    for axis, number, of_levels in ranges:
        in_order = of_levels if axis == "cache" or number % 2 == 0 else of_levels[::-1]
        for time, medians in _medians(steps, in_order).items():
            found[axis].setdefault(time, []).append(medians)
    return found, engine.patch_hashes


def _order(axis: str, number: int) -> list[int]:
    levels = list(AXES[axis].levels)
    # |cache| only grows.
    return levels if axis == "cache" or number % 2 == 0 else levels[::-1]


def _read(records: Path) -> pl.DataFrame:
    whole = [PhaseStart(name="growth", start_ns=0, reset_ns=None)]
    return step_table(0, read_engine_steps(records, whole), read_worker_steps(records))


def _medians(
    steps: pl.DataFrame, ranges: list[tuple[int, int]]
) -> dict[str, list[float]]:
    """By time, of each of `ranges` of step_id."""
    times = [*PER_STEP, *method_columns(steps)]
    found: dict[str, list[float]] = {time: [] for time in times}
    for first, end in ranges:
        own = steps.filter(pl.col("step_id").is_between(first, end, closed="left"))
        if own.height != end - first:
            raise RuntimeError(f"{own.height} records of {end - first} steps")
        for time in times:
            found[time].append(float(own[time].median() or 0.0))
    return found


def try_one(connector: Connector, installed: Installation) -> dict[str, Any]:
    """As `measure`, in a folder of its own; {"error": ...} if it cannot be measured."""
    with tempfile.TemporaryDirectory(prefix="kvtax-cell-") as folder:
        try:
            medians, hashes = measure(connector, installed, Path(folder) / "cell")
        except RuntimeError as error:
            return {"error": str(error)}
    return {"medians_us": medians, "patches": hashes}
