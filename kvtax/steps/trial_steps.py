# SPDX-License-Identifier: Apache-2.0
"""From the step files of a trial to its table of engine steps.

The table has one row for each step that began in a phase; steps before the growth phase
(the dummy runs of an engine start) belong to none and are left out. Its columns:

- repeat, step_id, t_ns, phase (a number of kvtax.records.requests), cycle (prefix-cache
  resets before it: in a hold, that is its pass), level (of a hold), batch (requests
  scheduled), cache_blocks (|cache| at the end of schedule()), tokens (scheduled);
- decode_only: requests were scheduled, all of them decodes; prefills: prompt tokens
  were scheduled;
- the times in us of kvtax.records.steps, the yardstick's among them, and the sums
  below; a time is null if it was not measured.

The sums:

- connector_us, overhead_us, worker_calls_us: see kvtax.steps.parts.
- scheduler_cpu_us: CPU time of the engine's thread in schedule() and in
  update_from_output().
- threads_us: CPU time per step of the threads of the engine's process that are not
  vLLM's own (with_threads).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import polars as pl

from kvtax.records.files import read_lines
from kvtax.records.requests import Phase, PhaseStart, level_of
from kvtax.records.steps import WORKER_TIMES, ThreadsHeader, ThreadTimes
from kvtax.steps.parts import CALLS, method_columns, step_parts

ENGINE_TIMES = ("schedule_us", "build_meta_us", "step_us", "update_us")
CLOCKS = ("thread_cpu_us", "schedule_cpu_us", "update_cpu_us")
STEP_TIMES = ENGINE_TIMES + WORKER_TIMES


def trial_steps(
    repeat: int, recorded: pl.DataFrame, phases: list[PhaseStart]
) -> pl.DataFrame:
    """Select the `recorded` steps of a life that ended and lie in a phase."""
    methods = method_columns(recorded)
    calls = [name.removesuffix("_us") + CALLS for name in methods]
    parts = step_parts(methods)
    phase, cycle, level = _place(phases)
    prefills = pl.col("prefill_tokens") > 0
    whole = pl.col("step_us").is_not_null()
    return recorded.filter(whole, phase < len(Phase)).select(
        pl.lit(repeat, dtype=pl.Int16).alias("repeat"),
        *("step_id", "t_ns"),
        phase.alias("phase"),
        cycle.alias("cycle"),
        level.alias("level"),
        pl.col("scheduled").cast(pl.Int16).alias("batch"),
        pl.col("cache_size").alias("cache_blocks"),
        (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"),
        (~prefills & (pl.col("decode_tokens") > 0)).alias("decode_only"),
        prefills.alias("prefills"),
        *(*STEP_TIMES, *CLOCKS, "yardstick_us", *methods, *calls),
        *(parts[name] for name in ("connector_us", "overhead_us", "worker_calls_us")),
        (pl.col("schedule_cpu_us") + pl.col("update_cpu_us")).alias("scheduler_cpu_us"),
    )


class Span(NamedTuple):
    """A phase, the resets before it, its level and when it begins."""

    phase: Phase
    cycle: int
    level: int
    begins_ns: int


def phase_starts(phases: list[PhaseStart]) -> list[Span]:
    """Find the phases in order; a reset begins a cycle.

    A phase after a reset begins at the reset itself: steps before it still see the full
    cache.
    """
    found, cycle = [], 0
    for start in phases:
        cycle += start.reset_ns is not None
        phase = Phase.of(start.name)
        if phase is not None:
            begins_ns = start.start_ns if start.reset_ns is None else start.reset_ns
            level = level_of(start.name)
            found.append(Span(phase, cycle, level, begins_ns))
    return found


def _place(phases: list[PhaseStart]) -> tuple[pl.Expr, pl.Expr, pl.Expr]:
    """Return phase, cycle and level of a step by when it began.

    The last phase that began at or before the step; len(Phase) stands for none.
    """
    phase, zero = pl.lit(len(Phase), pl.UInt8), pl.lit(0, pl.UInt8)
    cycle, level = zero, zero
    for span in phase_starts(phases):
        since = pl.when(pl.col("t_ns") >= span.begins_ns)
        phase = since.then(pl.lit(int(span.phase), pl.UInt8)).otherwise(phase)
        cycle = since.then(pl.lit(span.cycle, pl.UInt8)).otherwise(cycle)
        level = since.then(pl.lit(span.level, pl.UInt8)).otherwise(level)
    return phase, cycle, level


SCHEMA = {
    "repeat": pl.Int16,
    "step_id": pl.Int64,
    "phase": pl.UInt8,
    "cycle": pl.UInt8,
    "level": pl.UInt8,
    "batch": pl.Int16,
    "cache_blocks": pl.Int32,
    "steps": pl.Int64,
    "thread": pl.String,
    "us": pl.Float64,
    "us_per_step": pl.Float64,
}


# vLLM's own: those that were there before the connector, and those that serve requests
# and are as busy as these. And our recorder's.
OWN = r"^MainThread$|^model executor$|\(process_(in|out)put_sockets\)$|^records-"
NO_THREADS = pl.DataFrame(schema=SCHEMA)
PLACE = ("phase", "cycle", "level")


def read_threads(path: Path, steps: pl.DataFrame) -> pl.DataFrame:
    """Read a row for each sample and thread; empty without the file.

    Threads of equal names count as one: their numbers differ from server to server.
    `steps` is the trial's table of steps: a sample has the |cache| and the place of its
    last step. Samples without a step, or across two places, are left out. `batch` is 0.
    """
    if not path.is_file() or not steps.height:
        return NO_THREADS
    records = read_lines(path, ThreadsHeader, ThreadTimes).records
    names = sorted({_kind(name) for record in records for name in record.threads})
    at = dict(
        zip(
            steps["step_id"].to_list(),
            steps.select("repeat", *PLACE, "cache_blocks").iter_rows(),
            strict=True,
        )
    )
    rows = []
    for before, record in pairwise(records):
        made = record.step_id - before.step_id
        if made <= 0 or record.step_id not in at or before.step_id + 1 not in at:
            continue
        repeat, *place, blocks = at[record.step_id]
        if place != list(at[before.step_id + 1][1:-1]):
            continue
        spent = dict.fromkeys(names, 0.0)
        for name, us in record.threads.items():
            spent[_kind(name)] += us
        for name, us in spent.items():
            at_step = (repeat, record.step_id, *place, 0, blocks, made)
            rows.append((*at_step, name, us, us / made))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def with_threads(steps: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """Add threads_us at the last step of each sample, null elsewhere.

    CPU time per step since the sample before, of all threads but vLLM's own.
    """
    others = threads.filter(~pl.col("thread").str.contains(OWN))
    spent = others.group_by("step_id").agg(
        pl.col("us_per_step").sum().alias("threads_us")
    )
    return steps.join(spent, on="step_id", how="left", maintain_order="left")


def _kind(name: str) -> str:
    return name.partition("#")[0]
