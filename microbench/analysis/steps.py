# SPDX-License-Identifier: Apache-2.0
"""From the step files of a trial to its table of engine steps.

The table has one row for each step that began in a phase; steps before the growth phase
(the dummy runs of an engine start) belong to none and are left out. Its columns:

- repeat, step_id, t_ns, phase (a number of lab.records.phases), cycle (prefix-cache
  resets before it), batch (requests scheduled), cache_blocks (|cache| at the end of
  schedule()), tokens (scheduled);
- decode_only: requests were scheduled, all of them decodes; prefills: prompt tokens
  were scheduled;
- the times in us of lab.records.steps and the sums below. A time that was not measured
  is null.

The sums:

- connector_us: all calls of the connector's methods, of scheduler and worker, none
  counted twice. `scheduler.NAME_us` and `worker.NAME_us` are its parts, the time of a
  method less that of the connector's methods which it called.
- overhead_us: what scheduler and connector make up of a step: schedule_us
  (build_meta_us within), update_us, and the connector's calls in the worker. The model
  and the waiting for it are not in it, nor is their noise.
- scheduler_cpu_us: CPU time of the engine's thread in schedule() and in
  update_from_output().
- slowness (microbench.analysis.speed): how slow the machine was, 1 as usual.
- threads_us (microbench.analysis.threads): CPU time per step of the threads of the
  engine's process that are not vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.records.phases import Phase
from lab.records.requests import PhaseStart
from lab.records.step_table import StepFile, read_steps
from lab.records.steps import WORKER_TIMES, EngineHeader, WorkerHeader

ENGINE_TIMES = ("schedule_us", "build_meta_us", "step_us", "update_us")
CLOCKS = ("thread_cpu_us", "schedule_cpu_us", "update_cpu_us")
COUNTS = ("scheduled", "prefill_tokens", "decode_tokens", "cache_size")
STEP_TIMES = ENGINE_TIMES + WORKER_TIMES
# What runs from before all methods were timed know of the worker's.
CONNECTOR_TIMES = tuple(name for name in WORKER_TIMES if name != "execute_model_us")
# A record's field by method, and how its columns here end.
BY_METHOD = {"connector_self_us": "_us", "connector_calls": "_calls"}
CALLS = "_calls"
SIDES = ("scheduler", "worker")


def step_table(repeat: int, engine: StepFile, worker: StepFile) -> pl.DataFrame:
    """The table of a trial from its engine's and its worker's steps."""
    joined = join_worker(engine.frame, worker.frame)
    methods = method_columns(joined)
    calls = [name.removesuffix("_us") + CALLS for name in methods]
    return joined.select(
        pl.lit(repeat, dtype=pl.Int16).alias("repeat"),
        *("step_id", "t_ns", "phase", "cycle", "batch", "cache_blocks", "tokens"),
        *("decode_only", "prefills", *STEP_TIMES, *CLOCKS, *methods, *calls),
        connector_us(methods).alias("connector_us"),
        overhead_us(methods).alias("overhead_us"),
        (pl.col("schedule_cpu_us") + pl.col("update_cpu_us")).alias("scheduler_cpu_us"),
    )


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


def phase_starts(phases: list[PhaseStart]) -> list[tuple[Phase, int, int]]:
    """(phase, cycle, when it begins in ns) in order; a reset begins a cycle.

    A phase after a reset begins at the reset itself: steps before it still see the full
    cache.
    """
    found, cycle = [], 0
    for told in phases:
        cycle += told.reset_ns is not None
        phase = Phase.of(told.name)
        if phase is not None:
            begins_ns = told.start_ns if told.reset_ns is None else told.reset_ns
            found.append((phase, cycle, begins_ns))
    return found


def read_engine_steps(folder: Path, phases: list[PhaseStart]) -> StepFile:
    """The steps of a trial that lie in a phase."""
    files = sorted(folder.glob("engine_step*.jsonl"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise RecordsError(
            f"{folder}: {len(files)} engine step files ({names}); a trial is one "
            "engine core, run the configs one engine at a time"
        )
    path = folder / "engine_step.jsonl"
    # Of the last phase that began at or before the step; len(Phase) stands for none.
    phase, cycle = pl.lit(len(Phase), pl.UInt8), pl.lit(0, pl.UInt8)
    for begun, number, begins_ns in phase_starts(phases):
        since = pl.when(pl.col("t_ns") >= begins_ns)
        phase = since.then(pl.lit(int(begun), pl.UInt8)).otherwise(phase)
        cycle = since.then(pl.lit(number, pl.UInt8)).otherwise(cycle)
    prefills = pl.col("prefill_tokens") > 0

    def shape(chunk: pl.LazyFrame) -> pl.LazyFrame:
        whole = pl.col("step_us").is_not_null()
        return chunk.filter(whole, phase < len(Phase)).select(
            *("step_id", "t_ns"),
            phase.alias("phase"),
            cycle.alias("cycle"),
            pl.col("scheduled").cast(pl.Int16).alias("batch"),
            pl.col("cache_size").alias("cache_blocks"),
            (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"),
            (~prefills & (pl.col("decode_tokens") > 0)).alias("decode_only"),
            prefills.alias("prefills"),
            *ENGINE_TIMES,
            *CLOCKS,
            *BY_METHOD,
        )

    columns = ("step_id", "t_ns", *COUNTS, *ENGINE_TIMES, *CLOCKS, *BY_METHOD)
    engine = read_steps(path, EngineHeader, columns, shape)
    if engine.records == 0:
        raise RecordsError(f"{path}: no engine steps")
    steps = engine.frame.height
    if steps and engine.frame["cache_blocks"].null_count() == steps:
        raise RecordsError(
            f"{path}: records of step_timing_v1 only, without cache_size; add the "
            "patch step_timing_v2 to the config and run again"
        )
    return _by_method("scheduler", replace(engine, frame=_ordered(path, engine.frame)))


def read_worker_steps(folder: Path) -> StepFile:
    """Worker times by step; of several ranks those of the slowest in that step."""
    files = sorted(folder.glob("worker_step.r*.jsonl"))
    if not files:
        raise RecordsError(
            f"{folder}: no worker_step.r*.jsonl; was step_timing_v1 applied?"
        )
    ranks = []
    for path in files:
        rank = read_steps(path, WorkerHeader, ("step_id", *WORKER_TIMES, *BY_METHOD))
        ordered = replace(rank, frame=_ordered(path, rank.frame))
        ranks.append(_by_method("worker", ordered))
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


def _by_method(side: str, file: StepFile) -> StepFile:
    """What is told of each of the connector's methods, as columns of their own."""
    frame = file.frame
    for field, ending in BY_METHOD.items():
        told = frame[field].struct
        names = [f"{side}.{name}{ending}" for name in told.fields]
        frame = frame.drop(field)
        if names:
            frame = frame.hstack(told.rename_fields(names).struct.unnest())
    return replace(file, frame=frame)


def _ordered(path: Path, frame: pl.DataFrame) -> pl.DataFrame:
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
