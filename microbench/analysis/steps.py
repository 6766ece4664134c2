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

from dataclasses import replace
from pathlib import Path

import polars as pl

from lab.records import RecordsError
from lab.records.joined_steps import (
    BY_METHOD,
    CALLS,
    by_method,
    connector_us,
    join_worker,
    method_columns,
    ordered,
    overhead_us,
)
from lab.records.phases import Phase
from lab.records.requests import PhaseStart
from lab.records.step_table import StepFile, read_steps
from lab.records.steps import WORKER_TIMES, EngineHeader

ENGINE_TIMES = ("schedule_us", "build_meta_us", "step_us", "update_us")
CLOCKS = ("thread_cpu_us", "schedule_cpu_us", "update_cpu_us")
COUNTS = ("scheduled", "prefill_tokens", "decode_tokens", "cache_size")
STEP_TIMES = ENGINE_TIMES + WORKER_TIMES


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
    return by_method("scheduler", replace(engine, frame=ordered(path, engine.frame)))
