# SPDX-License-Identifier: Apache-2.0
"""Made-up step records for tests and benchmarks, from the table of step fields.

write_steps(trial / "engine_step.jsonl", EngineHeader(pid=1),
            step_columns("engine", ids, schedule_us=times))
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvtax.records.observatory_cell import AxisHolds, CellRecord
from kvtax.records.profile import Ladder, Load, ProfileRecord
from kvtax.records.steps import FIELDS, EngineHeader, WorkerHeader
from kvtax.verdict.axes import AXES

FIRST_NS = 10**14
STEP_NS = 300_000
# The first field of a line is never null.
NULL = re.compile(rb',"\w+":null')
Columns = dict[str, Any]


def step_columns(
    side: Literal["engine", "worker"], ids: NDArray[np.int64], **given: Any
) -> Columns:
    """Make a column per count, 0 unless `given`, and those times that are `given`.

    Steps begin every 300 us. Raises TypeError for a name that is no step field.
    """
    known = {field.name: field for field in FIELDS if field.side == side}
    if unknown := given.keys() - known:
        raise TypeError(f"not fields of {side} steps: {', '.join(sorted(unknown))}")
    columns: Columns = {"step_id": ids, "t_ns": FIRST_NS + ids * STEP_NS}
    for name, field in known.items():
        if name in given:
            columns[name] = given[name]
        elif field.unit in ("requests", "tokens", "blocks"):
            columns[name] = np.zeros(len(ids), int)
    return columns


def call_columns(us: Mapping[str, NDArray[np.float64]]) -> Columns:
    """Make the columns by method of one call per step, each without inner calls."""
    times = pl.DataFrame(dict(us))
    calls = times.select(pl.lit(1).repeat_by(pl.len()).explode().alias(n) for n in us)
    return {
        "connector_calls": calls.to_struct(),
        "connector_us": times.to_struct(),
        "connector_self_us": times.to_struct(),
    }


def write_steps(
    path: Path, header: EngineHeader | WorkerHeader, *batches: Columns
) -> None:
    """Write a step file: its header, then the records of each batch of columns."""
    write_lines(path, header, (pl.DataFrame(columns) for columns in batches))


def write_lines(
    path: Path, header: msgspec.Struct, batches: Iterable[pl.DataFrame]
) -> None:
    """Write a file of JSON lines: its header, then a line per row of each batch.

    A field that is null is left out, as the recorder does.
    """
    with path.open("wb") as file:
        file.write(msgspec.json.encode(header) + b"\n")
        for batch in batches:
            lines = io.BytesIO()
            batch.write_ndjson(lines)
            file.write(NULL.sub(b"", lines.getbuffer()))


def profile(ladder: Ladder, **changes: Any) -> ProfileRecord:
    """Make a profile whose levels are those of `ladder`."""
    load = Load(
        prompt_tokens=512,
        output_tokens=64,
        rate_rps=4.0,
        arrival="constant",
        plateau_requests=10,
        lag_budget_ms=2.0,
        request_timeout_s=60.0,
        ladder=ladder,
    )
    settings = {
        "flavour": "cpu",
        "num_blocks": 16_000,
        "block_size": 16,
        "max_model_len": 8_192,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": 64,
        "name": "synthetic",
        "summary": "made up",
        "null_model": True,
        "configs": [],
        "repeats": 1,
        "most_repeats": 1,
        "minutes": 60.0,
        "load": load,
    }
    return ProfileRecord(**settings | changes)


PASSES = 9
META = "scheduler.build_connector_meta_us"
PROVENANCE = {
    "git_commit": "0123456789abcdef",
    "date_utc": "2026-11-22T10:00:00+00:00",
    "patch_hashes": {},
}

Cost = Callable[[float], float]


def slow_at(*levels: int, axis: str = "cache") -> AxisHolds:
    """Holds of `axis` with one slow step at each of these levels, in each pass.

    A hold takes 1 s. Levels come in random order, with a reset before a lower one.
    """
    random = np.random.default_rng(2)
    holds = AxisHolds(steps=150)
    count, time_s, age_s, before = len(AXES[axis].levels), 0.0, 0.0, -1
    for _ in range(PASSES):
        times, ages = np.zeros(count), np.zeros(count)
        for level in random.permutation(count):
            time_s += 1.0
            age_s = age_s + 1.0 if level >= before else 0.5
            times[level], ages[level], before = time_s, age_s, level
        holds.time_s.append(times.tolist())
        holds.age_s.append(ages.tolist())
        holds.slow.append([int(level in levels) for level in AXES[axis].levels])
    return holds


def made(
    connector: str = "mine", release: str = "0.32.0", noise: float = 0.02, **costs: Cost
) -> CellRecord:
    """A cell in which build_connector_meta costs `costs[axis](level)` us, else 10."""
    random = np.random.default_rng(1)

    def passes(axis: str) -> list[list[float]]:
        cost = costs.get(axis, lambda level: 10.0)
        real = np.array([cost(level) for level in AXES[axis].levels])
        scale = 1 + noise * random.standard_normal((PASSES, len(real)))
        return (real * scale).tolist()

    return CellRecord(
        release=release,
        connector=connector,
        provenance=dict(PROVENANCE),
        wall_s=24.0,
        levels={axis: list(axis_of.levels) for axis, axis_of in AXES.items()},
        means_us={
            axis: {"connector_us": us, META: us}
            for axis in AXES
            for us in [passes(axis)]
        },
    )
