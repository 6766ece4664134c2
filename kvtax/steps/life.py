# SPDX-License-Identifier: Apache-2.0
"""The steps of one engine life: its step file, joined with those of its workers.

Everything that cannot be read, or is not as it should be, becomes a warning with its
count: one bad file does not hide the others. Verdicts rest on whole records only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.records import RecordsError
from kvtax.records.parts import whole
from kvtax.records.steps import (
    FIELDS,
    STEPS,
    WORKER_TIMES,
    EngineHeader,
    WorkerHeader,
    another_life,
    method_fields,
)
from kvtax.records.warning import RunWarning, Warn, left_out
from kvtax.steps.parquet_cache import RecordedSteps, cached
from kvtax.steps.parts import CALLS, method_columns
from kvtax.steps.step_file import BY_METHOD, StepFile, newest_header, read_steps

# `connector_us` counts the time of inner calls twice.
ENGINE_COLUMNS = [
    field.name
    for field in FIELDS
    if field.side == "engine" and field.name != "connector_us"
]
WORKER_COLUMNS = ["step_id", "t_ns", *WORKER_TIMES, *BY_METHOD]
# As many of a worker's steps show whether they are the engine's.
SAMPLED_STEPS = 10_000
# Share of steps in which ranks work one after the other, from which on they are stages.
MOST_IN_TURNS = 0.9
# Share and number of steps that are in a file twice, from which on two processes wrote
# it.
MOST_TWICE, FEW_TWICE = 0.01, 10
# Warnings of records that are missing in a table of steps.
NOT_WHOLE = ("unreadable", "bad_lines", "another_life", "no_worker")


def whole_steps(life: Path) -> RecordedSteps:
    """Read the steps of a server that has ended. Raises RecordsError if any is missing.

    `life` is the folder of the records.
    """
    steps = recorded_steps(life / STEPS, ended=True)
    for warning in steps.warnings:
        if warning.kind in NOT_WHOLE:
            raise RecordsError(warning.message)
    return steps


def recorded_steps(engine: Path, ended: bool = False) -> RecordedSteps:
    """Read the steps of an `engine` file, with the times of the workers beside it.

    The table has a row per step, in order: all fields of the engine's record, times of
    the worker's (null without one), `worker_t_ns`, and the methods' columns
    (kvtax.steps.parts). Raises RecordsError if the file cannot be read at all.
    """
    return cached(engine, lambda: _read(engine), ended)


def _read(path: Path) -> RecordedSteps:
    header = newest_header(path, EngineHeader)
    engine = ordered(path, read_steps(path, EngineHeader, ENGINE_COLUMNS, strict=False))
    warnings = left_out(path.name, engine.torn_lines, engine.bad)
    warnings += _not_timed("scheduler", header)
    frame = by_method("scheduler", engine.frame)
    ranks, of_ranks = _ranks(path.parent, header, frame)
    worker = _together(ranks)
    table = (
        frame.lazy()
        .join(worker.lazy(), on="step_id", how="left", maintain_order="left")
        .collect(engine="streaming")
    )
    warnings += of_ranks
    if ranks:
        bad = [line for rank in ranks for line in rank.file.bad]
        torn = sum(rank.file.torn_lines for rank in ranks)
        warnings += left_out("worker_step", torn, bad)
        warnings += _without_worker(table)
    files = [engine, *(rank.file for rank in ranks)]
    return RecordedSteps(
        table=table,
        worker_records=sum(rank.file.frame.height for rank in ranks),
        torn_lines=sum(file.torn_lines for file in files),
        warnings=warnings,
    )


class _Rank(NamedTuple):
    """The steps of one worker, and its stage of the pipeline where that is recorded."""

    stage: int | None
    file: StepFile


def _ranks(
    folder: Path, engine_header: EngineHeader, engine: pl.DataFrame
) -> tuple[list[_Rank], list[RunWarning]]:
    """Read the workers' times by rank, those of this life."""
    parts = folder.glob("worker_step.r*.jsonl*")
    # A writer that was killed as it began a file leaves it as .new.
    paths = sorted({whole(path) for path in parts if path.suffix != ".new"})
    why = "see the other warnings"
    if not paths:
        why = f"{folder}: no worker_step.r*.jsonl; was the worker's process recorded?"
    ranks, warnings = [], []
    for path in paths:
        try:
            header = newest_header(path, WorkerHeader)
            rank = read_rank(path)
        except RecordsError as error:
            warnings.append(Warn.UNREADABLE(path.name, error=error, what="The file"))
            continue
        reason = another_life(engine_header, header, process=False)
        if reason := reason or _other_steps(engine, rank.frame):
            warnings.append(Warn.ANOTHER_LIFE(path.name, path=path, why=reason))
            continue
        ranks.append(_Rank(header.stage, rank))
        warnings += _not_timed("worker", header)
    warnings = list(dict.fromkeys(warnings))
    if not ranks:
        warnings.append(Warn.NO_WORKER(why=why))
    return ranks, warnings


def _without_worker(steps: pl.DataFrame) -> list[RunWarning]:
    alone = int(steps["execute_model_us"].null_count())
    # The last steps of an engine that is killed, and those that schedule nothing.
    if alone <= max(10, steps.height // 100):
        return []
    return [Warn.STEPS_WITHOUT_WORKER(count=alone, steps=steps.height)]


def _not_timed(side: str, header: EngineHeader | WorkerHeader) -> list[RunWarning]:
    """Warn of methods that the recorder could not time."""
    return [
        Warn.NOT_TIMED(f"{side}.{method}", why=why)
        for method, why in header.not_timed.items()
    ]


def _other_steps(engine: pl.DataFrame, worker: pl.DataFrame) -> str:
    """Say why the worker's steps are not the engine's; empty if they may be.

    A worker begins a step within the engine's step of that number.
    """
    some = worker.select("step_id", "worker_t_ns").gather_every(
        max(worker.height // SAMPLED_STEPS, 1)
    )
    both = some.join(engine.select("step_id", "t_ns", "step_us"), on="step_id")
    end_ns = pl.col("t_ns") + (pl.col("step_us") * 1e3).cast(pl.Int64, strict=False)
    inside = pl.col("worker_t_ns").is_between(pl.col("t_ns"), end_ns)
    outside = both.filter(~inside).height
    if outside <= both.height / 2:
        return ""
    return (
        f"of another life of the engine: {outside / both.height:.0%} of its steps lie "
        "outside of the engine's steps of their number"
    )


def read_rank(path: Path) -> StepFile:
    """Read the times of one rank by step. Raises RecordsError."""
    rank = ordered(path, read_steps(path, WorkerHeader, WORKER_COLUMNS, strict=False))
    frame = rank.frame.rename({"t_ns": "worker_t_ns"})
    return replace(rank, frame=by_method("worker", frame))


def _together(ranks: Sequence[_Rank]) -> pl.DataFrame:
    """Make one worker of the ranks: ranks of a tensor group are one, stages add up."""
    stages = [_slowest(frames) for frames in _stages(ranks)]
    if len(stages) == 1:
        return stages[0]
    if not stages:
        moments = dict.fromkeys(("step_id", "worker_t_ns"), pl.Int64())
        times = dict.fromkeys(WORKER_TIMES, pl.Float32())
        return pl.DataFrame(schema=pl.Schema({**moments, **times}))
    ended_ns = pl.col("worker_t_ns") + pl.col("execute_model_us") * 1e3
    every = (
        pl.concat(stages, how="diagonal")
        .sort("step_id", "worker_t_ns")
        .with_columns(ended_ns.alias("ended_ns"))
    )
    before_ns = pl.col("ended_ns").cum_max().shift(1).over("step_id")
    # A stage may wait for the one before within its own call: that time counts once.
    since_ns = pl.max_horizontal("worker_t_ns", before_ns)
    alone_us = (pl.col("ended_ns") - since_ns).clip(lower_bound=0) / 1e3
    own = ("step_id", "worker_t_ns", "execute_model_us", "ended_ns")
    sums = [name for name in every.columns if name not in own]
    return (
        every.with_columns(alone_us.cast(pl.Float32).alias("execute_model_us"))
        .group_by("step_id", maintain_order=True)
        .agg(
            pl.col("worker_t_ns").min(),
            pl.len().alias("stages"),
            # A sum of nulls is 0, which would be a time.
            *(
                pl.when(pl.col(name).count() > 0).then(pl.col(name).sum())
                for name in ("execute_model_us", *sums)
            ),
        )
        .filter(pl.col("stages") == len(stages))
        .drop("stages")
        .with_columns(pl.col("step_id").set_sorted())
    )


def _stages(ranks: Sequence[_Rank]) -> list[list[pl.DataFrame]]:
    """Group the ranks' times by stage of the pipeline.

    Records that do not name it are of one stage, unless each begins its steps after
    the one before has ended them.
    """
    named = {rank.stage for rank in ranks}
    by_stage: dict[int, list[pl.DataFrame]] = {}
    for number, rank in enumerate(ranks):
        unnamed = number if named == {None} and _in_turns(ranks) else 0
        stage = unnamed if rank.stage is None else rank.stage
        by_stage.setdefault(stage, []).append(rank.file.frame)
    return list(by_stage.values())


def _in_turns(ranks: Sequence[_Rank]) -> bool:
    end_ns = pl.col("worker_t_ns") + pl.col("execute_model_us") * 1e3
    return len(ranks) > 1 and all(
        one.file.frame.select("step_id", end_ns.alias("end_ns"))
        .join(after.file.frame.select("step_id", "worker_t_ns"), on="step_id")
        .select((pl.col("worker_t_ns") >= pl.col("end_ns")).mean() > MOST_IN_TURNS)
        .item()
        for one, after in pairwise(ranks)
    )


def _slowest(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Select the slowest of the ranks of a tensor group in each step."""
    if len(frames) == 1:
        return frames[0]
    every = pl.concat(frames, how="diagonal")
    # A step waits for its slowest rank; parts of two ranks would sum to no step.
    last = every.sort("step_id", "execute_model_us", nulls_last=False)
    return last.unique("step_id", keep="last", maintain_order=True)


def by_method(side: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Give each of the connector's methods columns of its own.

    A record leaves out what its other fields say, which is filled in. A method that was
    called and not timed in a step gets the mean per call of those that were.
    """
    for field, ending in BY_METHOD.items():
        by_name = frame[field].struct
        names = [f"{side}.{name}{ending}" for name in by_name.fields]
        frame = frame.drop(field)
        if names:
            frame = frame.hstack(by_name.rename_fields(names).struct.unnest())
    methods = [name.removesuffix("_us") for name in method_columns(frame)]
    fields = method_fields(side, [name.partition(".")[2] for name in methods])
    return _completed(frame, side, methods, fields)


def _completed(
    frame: pl.DataFrame, side: str, methods: Sequence[str], fields: Mapping[str, str]
) -> pl.DataFrame:
    by_field = {f"{side}.{name}": pl.col(field) for name, field in fields.items()}

    def columns(method: str) -> tuple[pl.Expr, pl.Expr]:
        us, calls = pl.col(f"{method}_us"), pl.col(f"{method}{CALLS}")
        us = us.fill_null(by_field[method]) if method in by_field else us
        counted = frame[f"{method}{CALLS}"].count()
        timed = us.is_not_null()
        calls = calls.fill_null(pl.when(timed).then(pl.lit(1, pl.Float32)))
        if counted:
            mean_us = us.sum() / calls.filter(timed).sum()
            us = us.fill_null(calls * mean_us).cast(pl.Float32)
        return us, calls

    return frame.with_columns(
        column for method in methods for column in columns(method)
    )


def ordered(path: Path, file: StepFile) -> StepFile:
    """Sort by step_id (async scheduling may swap neighbours), each id once.

    Of a step that is there twice the first stays. Raises RecordsError if many are.
    """
    frame, bad = file.frame, file.bad
    if (np.diff(frame["step_id"].to_numpy()) <= 0).any():
        frame = frame.sort("step_id", maintain_order=True)
        twice = frame.filter(pl.col("step_id") == pl.col("step_id").shift(1))
        if twice.height > max(FEW_TWICE, MOST_TWICE * frame.height):
            raise RecordsError(
                f"{path}: {twice.height:,} steps twice, the first is step_id "
                f"{twice['step_id'][0]}: two processes wrote this file"
            )
        for step_id in twice["step_id"]:
            bad = (*bad, f"{path}: step_id {step_id} twice, the first one counts")
        frame = frame.unique("step_id", keep="first", maintain_order=True)
    return replace(
        file, frame=frame.with_columns(pl.col("step_id").set_sorted()), bad=bad
    )
