# SPDX-License-Identifier: Apache-2.0
"""An instance as it recorded itself: sums over its steps, its requests and threads.

Steps are read once, in chunks, and summed up as they come (kvtax.look.digest): memory
does not grow with their number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.look.digest import StepDigest
from kvtax.look.discover import ServerFiles, discover
from kvtax.look.requests import NO_REQUESTS, Marks, read_requests, split
from kvtax.look.threads import SpinningThread, spinning_threads
from kvtax.records import RecordsError
from kvtax.records.steps import (
    ENGINE_COUNTS,
    LONGEST_STEP_US,
    METHOD_FIELDS,
    EngineHeader,
)
from kvtax.records.warning import RunWarning, Warn
from kvtax.stats.distribution import Floats
from kvtax.steps.life import ENGINE_COLUMNS, LifeSteps
from kvtax.steps.parts import CALLS, STEP_PARTS, method_columns, step_parts

# What vLLM calls once, before there are steps.
START_METHODS = {
    "bind_gpu_block_pool",
    "get_finished_count",
    "get_handshake_metadata",
    "get_required_kvcache_layout",
    "init_kv_caches",
    "register_cross_layers_kv_cache",
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
}
# What vLLM calls in each step, and never between two.
IN_EACH_STEP = {f"{side}.{name}" for side, of in METHOD_FIELDS.items() for name in of}
# What of a step each side's calls are made in.
SPANS = {"scheduler": ("schedule_us", "update_us"), "worker": ("execute_model_us",)}
# Times are recorded to 0.1 us or better; a step's parts may pass it by rounding.
ROUNDING_US = 1.0


class OutsideCalls(NamedTuple):
    """Steps without the calls outside of them, and the time of these by method, in us.

    `between_us` is a sum over these steps.
    """

    steps: pl.DataFrame
    at_start_us: dict[str, float]
    between_us: dict[str, float]


def without_outside_calls(steps: pl.DataFrame, *, is_start: bool) -> OutsideCalls:
    """Take calls out of `steps` that cannot have been made within.

    Where it `is_start`, the first of them has the calls before all steps.

    Where a side's calls are longer than its own time in the step, and all parts longer
    than the step, its longest calls were made outside: they go, one method after the
    other, until the others fit.
    """
    methods = method_columns(steps)
    if not methods or not steps.height:
        return OutsideCalls(steps, {}, {})
    other_us = steps.select(step_parts(methods)["other_us"]).to_series()
    # Parts that are longer than their step have something in them that is outside.
    rows = np.union1d([0], np.flatnonzero((other_us < -ROUNDING_US).to_numpy()))
    some = steps[rows].with_columns(pl.col(methods).fill_null(0))
    us = some.select(methods).to_numpy().astype(float)
    outside = np.zeros(us.shape, bool)
    at_start = [_method(name).rpartition(".")[2] in START_METHODS for name in methods]
    outside[0] = np.array(at_start) & (us[0] > 0) & is_start
    fit: set[str] = set()  # sides whose calls fit: they still do with fewer calls
    for side in (name.partition(".")[0] for name in methods):
        if side in fit:
            continue
        kept_us = np.where(outside, 0, us)
        kept = some.with_columns(pl.DataFrame(kept_us, methods).get_columns())
        over = np.flatnonzero(_excess_us(kept, side) > ROUNDING_US)
        if not over.size:
            fit.add(side)
            continue
        may_be = [
            m.startswith(side) and _method(m) not in IN_EACH_STEP for m in methods
        ]
        longest_us = np.where(may_be, kept_us[over], 0)
        outside[over, longest_us.argmax(axis=1)] |= longest_us.any(axis=1)
    columns = []
    for name, gone in zip(methods, outside.T, strict=True):
        for column in (name, _method(name) + CALLS) if gone.any() else ():
            columns.append(steps[column].clone().scatter(rows[gone], None))
    taken_us = np.where(outside, us, 0)
    first = 1 if is_start else 0
    at_start_us, between_us = taken_us[:first].sum(axis=0), taken_us[first:].sum(axis=0)
    return OutsideCalls(
        steps.with_columns(columns),
        {
            _method(name): us
            for name, us in zip(methods, at_start_us, strict=True)
            if us
        },
        {_method(name): us for name, us in zip(methods, between_us, strict=True) if us},
    )


def _excess_us(steps: pl.DataFrame, side: str) -> Floats:
    """Compute the time of a side's calls for which there is no room in each step."""
    methods = method_columns(steps)
    calls_us = pl.sum_horizontal(
        pl.lit(0.0), *(pl.col(m).fill_null(0) for m in methods if m.startswith(side))
    )
    spans_us = pl.sum_horizontal(pl.col(name).fill_null(0) for name in SPANS[side])
    no_room_us = -step_parts(methods)["other_us"].fill_null(0)
    excess_us = pl.min_horizontal(calls_us - spans_us, no_room_us)
    return steps.select(excess_us).to_series().to_numpy().astype(float)


def _method(column: str) -> str:
    return column.removesuffix("_us")


TIMES = ("schedule_us", "update_us", "step_us")
# Fields of an engine's record that are read: its CPU clocks are for sweeps.
COLUMNS = [name for name in ENGINE_COLUMNS if not name.endswith("_cpu_us")]
# More of anything were never in a step.
MOST_COUNTED = 2**31


class Steps:
    """The steps of a life that ended, in chunks, and what was left out of them.

    A frame has a row per step, in order: `step_id`, `t_ns`, `end_ns`, ENGINE_COUNTS
    (null where not recorded), `step_us` and its parts, which add up to it: `model_us`,
    `scheduler_us`, `other_us` and a column for each method of the connector, all of
    which are `connector_us`; that is null where no method was timed, as its time is
    then in the other parts. Beside these, as they were recorded: `schedule_us`,
    `update_us`, `worker_t_ns`, `execute_model_us`. `alone_us` is the time in which no
    later step ran, and `followed_us` the step's where that is known. `run` counts the
    times that the clock went back.
    """

    def __init__(self, server: ServerFiles) -> None:
        self._life = LifeSteps(server.path, COLUMNS)
        self._every = server.header.every
        self.open = self.impossible = 0
        self.at_start_us: dict[str, float] = {}
        self.between_us: dict[str, float] = {}

    def __iter__(self) -> Iterator[pl.DataFrame]:
        held: pl.DataFrame | None = None
        run = 0
        for number, recorded in enumerate(self._life):
            steps = self._ended(recorded, is_start=number == 0)
            if held is not None:
                steps = pl.concat([held, steps], how="diagonal_relaxed")
            back = (pl.col("t_ns") < pl.col("t_ns").shift(1)).fill_null(value=False)
            steps = steps.with_columns((back.cum_sum() + run).alias("run"))
            steps = self._with_time_alone(steps)
            held = steps[-1:]
            run = int(held["run"][0]) if held.height else run
            yield steps[:-1]
        if held is not None:
            yield held

    @property
    def warnings(self) -> list[RunWarning]:
        """Say what was left out, once all frames were read."""
        left_out = {
            Warn.OPEN_STEPS: self.open,
            Warn.IMPOSSIBLE_STEPS: self.impossible,
        }
        counts = [warn(count=count) for warn, count in left_out.items() if count]
        return [*self._life.warnings, *counts]

    def _ended(self, recorded: pl.DataFrame, *, is_start: bool) -> pl.DataFrame:
        ended = recorded.drop_nulls("step_us")
        possible = ended if _are_possible(ended) else ended.filter(_possible(ended))
        self.open += recorded.height - ended.height
        self.impossible += ended.height - possible.height
        called = _called(possible)
        steps = _with_parts(called)
        if is_start or (steps["other_us"] < -ROUNDING_US).any():
            inside = without_outside_calls(called, is_start=is_start)
            self.at_start_us |= inside.at_start_us
            for method, us in inside.between_us.items():
                self.between_us[method] = self.between_us.get(method, 0.0) + us
            steps = _with_parts(inside.steps)
        # A worker's record may be longer than its step.
        return steps.with_columns(pl.col("other_us").clip(lower_bound=0))

    def _with_time_alone(self, steps: pl.DataFrame) -> pl.DataFrame:
        until_next_us = (pl.col("t_ns").shift(-1) - pl.col("t_ns")) / 1e3
        followed = until_next_us.is_not_null() & (until_next_us >= 0)
        if self._every > 1:
            # Of steps drawn at random, those whose next step was drawn show how much.
            followed &= pl.col("step_id").shift(-1) == pl.col("step_id") + 1
        step_us = pl.col("step_us").cast(pl.Float64)
        alone_us = pl.min_horizontal(step_us, until_next_us)
        return steps.with_columns(
            pl.when(followed).then(alone_us).alias("alone_us"),
            pl.when(followed).then(step_us).alias("followed_us"),
        )


@dataclass(frozen=True)
class Instance:
    """One engine lifetime.

    `requests` is a table of kvtax.look.requests. `at_start_us` and `between_us` are the
    connector's calls by method that were made before the first step and between two
    steps, and are in no step. `begun_ns` is when the steps began that requests name.
    """

    server: ServerFiles
    digest: StepDigest
    requests: pl.DataFrame = field(default_factory=lambda: NO_REQUESTS)
    all_requests: int = 0
    warnings: list[RunWarning] = field(default_factory=list)
    at_start_us: dict[str, float] = field(default_factory=dict)
    between_us: dict[str, float] = field(default_factory=dict)
    threads: list[SpinningThread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def header(self) -> EngineHeader:
        return self.server.header

    @property
    def vllm_version(self) -> str | None:
        return self.header.vllm_version

    @property
    def methods(self) -> list[str]:
        """The columns of the connector's methods; without any, its cost is unknown."""
        return self.digest.methods

    @functools.cached_property
    def steps(self) -> pl.DataFrame:
        """The steps, read once more into one table."""
        frames = list(Steps(self.server))
        table = pl.concat(frames, how="diagonal_relaxed")
        table = table.filter(pl.col("run") == _longest_run(frames))
        return table.with_columns(pl.col(method_columns(table)).fill_null(0))


def _longest_run(frames: Sequence[pl.DataFrame]) -> int:
    runs = pl.concat([frame.select("run") for frame in frames])["run"]
    return int(runs.mode().min() or 0) if len(runs) else 0  # type: ignore[arg-type]


def read_instances(folder: Path) -> tuple[list[Instance], list[RunWarning]]:
    """Read all instances below `folder` at once, and what is wrong with the others.

    Raises RecordsError if there are no step records at all.
    """
    servers, warnings = discover(folder)
    read = list(each_instance(servers))
    warnings += [of for of in read if isinstance(of, RunWarning)]
    return [of for of in read if isinstance(of, Instance)], warnings


def each_instance(servers: Sequence[ServerFiles]) -> Iterator[Instance | RunWarning]:
    """Yield each instance, or why it is left out."""
    for server in servers:
        try:
            yield read_instance(server)
        except (RecordsError, OSError) as error:
            # Also of a life that is removed meanwhile.
            yield Warn.UNREADABLE(server.name, error=error, what="The instance")


def _by_run(frame: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield the parts of a frame between which the clock went back."""
    runs = frame["run"]
    if frame.height and runs[0] == runs[-1]:
        yield int(runs[0]), frame
        return
    for (own,), part in frame.partition_by("run", as_dict=True).items():
        yield int(str(own)), part


@dataclass
class _Run:
    """Sums over steps whose clock never goes back."""

    digest: StepDigest
    marks: Marks


def read_instance(server: ServerFiles) -> Instance:
    """Read an instance. Raises RecordsError naming the line of a bad engine file."""
    folder = server.path.parent
    recorded = read_requests(folder, server.header)
    steps = Steps(server)
    kept = run = _Run(StepDigest(), Marks(recorded.table))
    number = left_out = 0
    for frame in steps:
        for own, part in _by_run(frame):
            if own != number:
                number, run = own, _Run(StepDigest(), Marks(recorded.table))
            run.marks.add(run.digest.add(part))
            if run is not kept and run.digest.steps > kept.digest.steps:
                left_out += kept.digest.steps - run.digest.steps + part.height
                kept = run
            elif run is not kept:
                left_out += part.height
    requests, of_requests = split(recorded, kept.marks.rows())
    return Instance(
        server,
        kept.digest,
        requests,
        recorded.all,
        [
            *steps.warnings,
            *_of_steps(kept.digest, left_out),
            *recorded.warnings,
            *of_requests,
        ],
        steps.at_start_us,
        steps.between_us,
        spinning_threads(folder),
    )


def _of_steps(digest: StepDigest, left_out: int) -> list[RunWarning]:
    warnings = [Warn.CLOCK(count=left_out)] if left_out else []
    if digest.steps and not digest.knows("cache_size"):
        warnings.append(Warn.NO_CACHE_SIZE())
    if not digest.steps:
        warnings.append(Warn.NO_STEPS())
    if digest.steps and not digest.methods:
        warnings.insert(0, Warn.CONNECTOR_UNKNOWN())
    return warnings


def _called(steps: pl.DataFrame) -> pl.DataFrame:
    """Leave out methods that were called in none of the steps, but for one.

    A server that never called its connector has a cost, of 0.
    """
    methods = method_columns(steps)
    idle = [name for name in methods if steps[name].null_count() == steps.height]
    idle = idle[len(idle) == len(methods) :]
    return steps.drop(*idle, *(_method(name) + CALLS for name in idle))


def _bounds(steps: pl.DataFrame) -> Iterator[tuple[list[str], float]]:
    """Yield columns and the most that there can be in one of their steps."""
    yield [*TIMES, "execute_model_us", *method_columns(steps)], LONGEST_STEP_US
    calls = [name for name in steps.columns if name.endswith(CALLS)]
    yield [*ENGINE_COUNTS, *calls], MOST_COUNTED


def _are_possible(steps: pl.DataFrame) -> bool:
    """Decide for all steps at once, as nearly always all are possible."""
    return all(
        steps.select(
            (pl.col(names).min() >= 0).fill_null(value=True).name.prefix("least."),
            (pl.col(names).max() <= most).fill_null(value=True),
        ).row(0)
        == (True,) * (2 * len(names))
        for names, most in _bounds(steps)
    )


def _possible(steps: pl.DataFrame) -> pl.Expr:
    """Select steps all of whose times and counts can be."""
    return pl.all_horizontal(
        pl.col(names).fill_null(0).is_between(0, most) for names, most in _bounds(steps)
    )


def _with_parts(steps: pl.DataFrame) -> pl.DataFrame:
    """Split the times of `steps` into parts that add up to `step_us`.

    `other_us` is below zero where the others are longer than the step.
    """
    methods = method_columns(steps)
    parts = step_parts(methods)
    return steps.select(
        *("step_id", "t_ns", *ENGINE_COUNTS, *TIMES, "execute_model_us", "worker_t_ns"),
        (pl.col("t_ns") + (pl.col("step_us") * 1e3).cast(pl.Int64)).alias("end_ns"),
        *(parts[name] for name in STEP_PARTS),
        *(pl.col(name).fill_null(0).cast(pl.Float32) for name in methods),
        *(pl.col(name.removesuffix("_us") + CALLS).fill_null(0) for name in methods),
    )
