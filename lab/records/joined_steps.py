# SPDX-License-Identifier: Apache-2.0
"""The engine's and the worker's records of a step, side by side in one table.

Each method of the connector has two columns: `scheduler.NAME_us` or `worker.NAME_us` is
its time less that of the connector's methods which it called, and the same name with
`_calls` says how often it was called.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.records.step_table import StepFile, read_steps
from lab.records.steps import WORKER_TIMES, WorkerHeader

# What runs from before all methods were timed know of the worker's.
CONNECTOR_TIMES = tuple(name for name in WORKER_TIMES if name != "execute_model_us")
# A record's field by method, and how its columns here end.
BY_METHOD = {"connector_self_us": "_us", "connector_calls": "_calls"}
CALLS = "_calls"
SIDES = ("scheduler", "worker")


def method_columns(steps: pl.DataFrame) -> list[str]:
    """The columns of single connector methods' times."""
    return [
        name
        for name in steps.columns
        if name.partition(".")[0] in SIDES and name.endswith("_us")
    ]


def connector_us(methods: Iterable[str]) -> pl.Expr:
    """All of the connector; null without one."""
    if methods:
        return _sum(methods)
    known = ("build_meta_us", *CONNECTOR_TIMES)
    there = pl.any_horizontal(pl.col(name).is_not_null() for name in known)
    return pl.when(there).then(_sum(known))


def overhead_us(methods: Iterable[str]) -> pl.Expr:
    """What scheduler and connector add to a step; null without a worker record."""
    in_worker = [name for name in methods if name.startswith("worker.")]
    connector = _sum(in_worker or CONNECTOR_TIMES)
    measured = pl.col("execute_model_us").is_not_null()
    parts = pl.col("schedule_us") + pl.col("update_us") + connector
    return pl.when(measured).then(parts)


def _sum(names: Iterable[str]) -> pl.Expr:
    return pl.sum_horizontal(pl.col(name).fill_null(0) for name in names)


def read_worker_steps(folder: Path) -> StepFile:
    """Worker times by step; of several ranks those of the slowest in that step."""
    files = sorted(folder.glob("worker_step.r*.jsonl"))
    if not files:
        raise RecordsError(
            f"{folder}: no worker_step.r*.jsonl; was step_timing_v1 applied?"
        )
    ranks = []
    for path in files:
        columns = ("step_id", "t_ns", *WORKER_TIMES, *BY_METHOD)
        rank = read_steps(path, WorkerHeader, columns)
        frame = ordered(path, rank.frame).rename({"t_ns": "worker_t_ns"})
        rank = replace(rank, frame=frame)
        ranks.append(by_method("worker", rank))
    if len(ranks) == 1:
        return ranks[0]
    every = pl.concat([rank.frame for rank in ranks], how="diagonal")
    # A step waits for its slowest rank; parts of two ranks would sum to no step.
    slowest = every.sort("step_id", "execute_model_us", nulls_last=False)
    return StepFile(
        frame=slowest.unique("step_id", keep="last", maintain_order=True),
        records=sum(rank.records for rank in ranks),
        torn_lines=sum(rank.torn_lines for rank in ranks),
    )


def by_method(side: str, file: StepFile) -> StepFile:
    """What is told of each of the connector's methods, as columns of their own."""
    frame = file.frame
    for field, ending in BY_METHOD.items():
        told = frame[field].struct
        names = [f"{side}.{name}{ending}" for name in told.fields]
        frame = frame.drop(field)
        if names:
            frame = frame.hstack(told.rename_fields(names).struct.unnest())
    return replace(file, frame=frame)


def ordered(path: Path, frame: pl.DataFrame) -> pl.DataFrame:
    """Sorted by step_id (async scheduling may swap neighbours), each id once."""
    steps = np.diff(frame["step_id"].to_numpy())
    if (steps <= 0).any():
        frame = frame.sort("step_id")
        steps = np.diff(frame["step_id"].to_numpy())
        if (steps == 0).any():
            twice = frame["step_id"][int(np.argmin(steps))]
            raise RecordsError(
                f"{path}: step_id {twice} twice; did two processes write this file?"
            )
    return frame.with_columns(pl.col("step_id").set_sorted())


def join_worker(engine: pl.DataFrame, worker: pl.DataFrame) -> pl.DataFrame:
    """Engine steps with the worker times of the same step, null where it has none."""
    return (
        engine.lazy()
        .join(worker.lazy(), on="step_id", how="left", maintain_order="left")
        .collect(engine="streaming")
    )
