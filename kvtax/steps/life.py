# SPDX-License-Identifier: Apache-2.0
"""The steps of one engine life: its step file, joined with those of its workers.

Everything that cannot be read, or is not as it should be, becomes a warning with its
count: one bad file does not hide the others. Verdicts rest on whole records only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from kvtax.steps.parts import CALLS, method_columns
from kvtax.steps.step_file import BY_METHOD, StepReader, in_order

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
# Warnings of records that are missing in a table of steps.
NOT_WHOLE = ("unreadable", "bad_lines", "another_life", "no_worker")


class RecordedSteps(NamedTuple):
    """The steps of one engine life as recorded, in one table."""

    table: pl.DataFrame
    worker_records: int
    torn_lines: int
    warnings: list[RunWarning]


def whole_steps(life: Path) -> RecordedSteps:
    """Read the steps of a server that has ended. Raises RecordsError if any is missing.

    `life` is the folder of the records.
    """
    steps = recorded_steps(life / STEPS)
    for warning in steps.warnings:
        if warning.kind in NOT_WHOLE:
            raise RecordsError(warning.message)
    return steps


def recorded_steps(engine: Path) -> RecordedSteps:
    """Read the steps of an `engine` file, with the times of the workers beside it."""
    life = LifeSteps(engine)
    table = pl.concat([*life], how="diagonal")
    return RecordedSteps(table, life.worker_records, life.torn_lines, life.warnings)


class LifeSteps:
    """The steps of one engine life, with the times of its workers, in chunks.

    A frame has a row per step, in order: the `columns` of the engine's record, times
    of the worker's (null without one), `worker_t_ns`, and the methods' columns
    (kvtax.steps.parts). What was left out is in `warnings` and the counts once all
    frames were read. Raises RecordsError if the file cannot be read at all.
    """

    def __init__(self, engine: Path, columns: Sequence[str] = ENGINE_COLUMNS) -> None:
        self._path = engine
        paths = _rank_files(engine.parent)
        files = 1 + len(paths)
        self._engine = StepReader(engine, EngineHeader, columns, files=files)
        header = self._engine.header
        assert isinstance(header, EngineHeader)
        self.header = header
        self.worker_records = self.torn_lines = 0
        self._steps = self._alone = 0
        self._of_ranks: list[RunWarning] = []
        self._ranks = self._open_ranks(paths, files)
        self._had_ranks = bool(self._ranks)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the frames; at least one, if only an empty one."""
        for frame in in_order(self._path, self._engine):
            steps = by_method("scheduler", frame)
            worker = _together(self._rows_until(steps))
            joined = _joined(steps, worker)
            self._steps += joined.height
            self._alone += joined["execute_model_us"].null_count()
            yield joined
        self.torn_lines = self._engine.torn_lines
        for rank in self._ranks:
            rank.drain()
            self.worker_records += rank.steps
            self.torn_lines += rank.reader.torn_lines

    @property
    def warnings(self) -> list[RunWarning]:
        """Say what was left out, and what was not recorded."""
        engine = self._engine
        warnings = left_out(self._path.name, engine.torn_lines, engine.bad)
        warnings += _not_timed("scheduler", self.header)
        return [*warnings, *self._of_ranks, *self._of_workers()]

    def _of_workers(self) -> list[RunWarning]:
        if not self._ranks:
            folder = self._path.parent
            why = "see the other warnings"
            if not self._had_ranks and not self._of_ranks:
                why = (
                    f"{folder}: no worker_step.r*.jsonl; was the worker's process "
                    "recorded?"
                )
            return [Warn.NO_WORKER(why=why)]
        bad = [line for rank in self._ranks for line in rank.reader.bad]
        torn = sum(rank.reader.torn_lines for rank in self._ranks)
        warnings = left_out("worker_step", torn, bad)
        # The last steps of an engine that is killed, and those that schedule nothing.
        if self._alone > max(10, self._steps // 100):
            warnings.append(
                Warn.STEPS_WITHOUT_WORKER(count=self._alone, steps=self._steps)
            )
        return warnings

    def _open_ranks(self, paths: list[Path], files: int) -> list[_Rank]:
        """Open the workers' files, those of this life."""
        ranks = []
        for path in paths:
            try:
                rank = _Rank(path, files)
            except RecordsError as error:
                self._of_ranks.append(
                    Warn.UNREADABLE(path.name, error=error, what="The file")
                )
                continue
            why = another_life(self.header, rank.header, process=False)
            if why:
                self._drop(rank, why)
                continue
            ranks.append(rank)
            self._of_ranks += [
                warning
                for warning in _not_timed("worker", rank.header)
                if warning not in self._of_ranks
            ]
        return ranks

    def _drop(self, rank: _Rank, why: str) -> None:
        rank.reader.close()
        self._of_ranks.append(
            Warn.ANOTHER_LIFE(rank.path.name, path=rank.path, why=why)
        )

    def _rows_until(self, steps: pl.DataFrame) -> list[list[pl.DataFrame]]:
        """Take the ranks' rows of these steps, by stage; drop ranks of another life."""
        if not steps.height:
            return _by_stage(self._ranks, [rank.nothing for rank in self._ranks])
        last = int(steps["step_id"][-1])
        rows, kept = [], []
        for rank in self._ranks:
            try:
                own = rank.until(last)
            except RecordsError as error:
                self._of_ranks.append(
                    Warn.UNREADABLE(rank.path.name, error=error, what="The file")
                )
                continue
            if not rank.is_checked and own.height:
                if why := _other_steps(steps, own):
                    self._drop(rank, why)
                    continue
                rank.is_checked = True
            rows.append(own)
            kept.append(rank)
        self._ranks = kept
        return _by_stage(kept, rows)


def _rank_files(folder: Path) -> list[Path]:
    """List the workers' files of steps."""
    parts = folder.glob("worker_step.r*.jsonl*")
    # A writer that was killed as it began a file leaves it as .new.
    return sorted({whole(path) for path in parts if path.suffix != ".new"})


class _Rank:
    """The steps of one worker, read on as far as the engine's."""

    def __init__(self, path: Path, files: int) -> None:
        self.path = path
        self.reader = StepReader(path, WorkerHeader, WORKER_COLUMNS, files=files)
        header = self.reader.header
        assert isinstance(header, WorkerHeader)
        self.header = header
        self.is_checked = False
        self.steps = 0
        self._frames = map(self._with_methods, in_order(path, self.reader))
        self.nothing = self._with_methods(
            pl.DataFrame(schema=pl.Schema(self.reader.schema))
        )
        self._ahead = self.nothing
        # Stage of the pipeline; as long as that is not known, None.
        self.stage = header.stage

    def until(self, step_id: int) -> pl.DataFrame:
        """Take the rows that are left up to this step. Raises RecordsError."""
        taken = []
        while not self._ahead.height or self._ahead["step_id"][-1] <= step_id:
            taken.append(self._ahead)
            frame = next(self._frames, None)
            if frame is None:
                self._ahead = self.nothing
                break
            self._ahead = frame
        ids = self._ahead["step_id"].to_numpy()
        count = int(np.searchsorted(ids, step_id, side="right"))
        taken.append(self._ahead[:count])
        self._ahead = self._ahead[count:]
        return pl.concat(taken, rechunk=False)

    def drain(self) -> None:
        """Read what is left, of steps that the engine did not record."""
        with suppress(RecordsError):
            for _ in self._frames:
                pass

    def _with_methods(self, frame: pl.DataFrame) -> pl.DataFrame:
        self.steps += frame.height
        return by_method("worker", frame.rename({"t_ns": "worker_t_ns"}))


def _joined(steps: pl.DataFrame, worker: pl.DataFrame) -> pl.DataFrame:
    """Put the worker's times beside each step; nearly always they are of the same."""
    if steps["step_id"].equals(worker["step_id"]):
        return steps.hstack(worker.drop("step_id"))
    return steps.join(worker, on="step_id", how="left", maintain_order="left")


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


def _together(by_stage: Sequence[Sequence[pl.DataFrame]]) -> pl.DataFrame:
    """Make one worker of the ranks: ranks of a tensor group are one, stages add up."""
    stages = [_slowest(frames) for frames in by_stage]
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


def _by_stage(
    ranks: Sequence[_Rank], rows: Sequence[pl.DataFrame]
) -> list[list[pl.DataFrame]]:
    """Group the ranks' rows by stage of the pipeline.

    Records that do not name it are of one stage, unless each begins its steps after
    the one before has ended them.
    """
    if {rank.stage for rank in ranks} == {None} and all(own.height for own in rows):
        in_turns = _in_turns(rows)
        for number, rank in enumerate(ranks):
            rank.stage = number if in_turns else 0
    by_stage: dict[int, list[pl.DataFrame]] = {}
    for rank, own in zip(ranks, rows, strict=True):
        by_stage.setdefault(rank.stage or 0, []).append(own)
    return list(by_stage.values())


def _in_turns(rows: Sequence[pl.DataFrame]) -> bool:
    end_ns = pl.col("worker_t_ns") + pl.col("execute_model_us") * 1e3
    return len(rows) > 1 and all(
        before.select("step_id", end_ns.alias("end_ns"))
        .join(after.select("step_id", "worker_t_ns"), on="step_id")
        .select((pl.col("worker_t_ns") >= pl.col("end_ns")).mean() > MOST_IN_TURNS)
        .item()
        for before, after in pairwise(rows)
    )


def _slowest(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Select the slowest of the ranks of a tensor group in each step."""
    slowest = frames[0]
    for frame in frames[1:]:
        slowest = _slower(slowest, frame)
    return slowest


def _slower(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    """Select, of each step, the row of the rank that took longer.

    A step waits for its slowest rank; parts of two ranks would sum to no step.
    """
    if first.columns == second.columns and first["step_id"].equals(second["step_id"]):
        of_first, of_second = (
            frame["execute_model_us"].fill_null(-1.0) for frame in (first, second)
        )
        is_second = of_second > of_first
        return pl.DataFrame(
            [second[name].zip_with(is_second, first[name]) for name in first.columns]
        )
    both = pl.concat([first, second], how="diagonal").sort(
        "step_id", "execute_model_us", nulls_last=False
    )
    return both.unique("step_id", keep="last", maintain_order=True)


def by_method(side: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Give each of the connector's methods columns of its own.

    A record leaves out what its other fields say, which is filled in. A method that was
    called and not timed in a step gets the mean per call of those that were.
    """
    for field, ending in BY_METHOD.items():
        by_name = frame[field]
        names = [f"{side}.{name}{ending}" for name in by_name.struct.fields]
        frame = frame.drop(field)
        if by_name.null_count() == len(by_name):
            nothing = pl.lit(None, pl.Float32)
            frame = frame.with_columns(nothing.alias(name) for name in names)
        elif names:
            frame = frame.hstack(by_name.struct.rename_fields(names).struct.unnest())
    methods = [name.removesuffix("_us") for name in method_columns(frame)]
    fields = method_fields(side, [name.partition(".")[2] for name in methods])
    named = {f"{side}.{name}" for name in fields}
    called = [
        method
        for method in methods
        if method in named
        or any(frame[f"{method}{end}"].count() for end in BY_METHOD.values())
    ]
    return _completed(frame, side, called, fields)


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
            mean_us = (us.sum() / calls.filter(timed).sum()).fill_nan(None)
            us = us.fill_null(calls * mean_us).cast(pl.Float32)
        return us, calls

    return frame.with_columns(
        column for method in methods for column in columns(method)
    )
