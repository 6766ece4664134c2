# SPDX-License-Identifier: Apache-2.0
"""An instance as it recorded itself: its steps, requests and samples."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.look.discover import ServerFiles, discover
from kvtax.look.flames import flames
from kvtax.look.requests import NO_REQUESTS, read_requests
from kvtax.records import RecordsError
from kvtax.records.steps import (
    ENGINE_COUNTS,
    LONGEST_STEP_US,
    METHOD_FIELDS,
    EngineHeader,
)
from kvtax.records.warning import RunWarning, Warn
from kvtax.report.document import Flame
from kvtax.stats.distribution import Floats, as_float
from kvtax.steps.life import recorded_steps
from kvtax.steps.parts import CALLS, SIDES, STEP_PARTS, method_columns, step_parts

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

    `between_us` is a sum over all steps.
    """

    steps: pl.DataFrame
    at_start_us: dict[str, float]
    between_us: dict[str, float]


def without_outside_calls(steps: pl.DataFrame) -> OutsideCalls:
    """Take calls out of `steps` that cannot have been made within.

    Where a side's calls are longer than its own time in the step, and all parts longer
    than the step, its longest calls were made outside: they go, one method after the
    other, until the others fit.
    """
    methods = method_columns(steps)
    if not methods or not steps.height:
        return OutsideCalls(steps, {}, {})
    sides = {side: _excess_us(steps, side) > ROUNDING_US for side in SIDES}
    rows = np.union1d([0], np.flatnonzero(np.any([*sides.values()], axis=0)))
    some = steps[rows].with_columns(pl.col(methods).fill_null(0))
    us = some.select(methods).to_numpy().astype(float)
    outside = np.zeros(us.shape, bool)
    is_start = [_method(name).rpartition(".")[2] in START_METHODS for name in methods]
    outside[0] = is_start & (us[0] > 0)
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
    at_start_us, between_us = taken_us[0], taken_us[1:].sum(axis=0)
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
# More of anything were never in a step.
MOST_COUNTED = 2**31


@dataclass(frozen=True)
class Instance:
    """One engine lifetime.

    `steps` has a row per step that ended, in order: `step_id`, `t_ns`, `end_ns`,
    ENGINE_COUNTS (null where not recorded), `step_us` and its parts, which add up to
    it: `model_us`, `scheduler_us`, `other_us` and a column for each method of the
    connector, all of which are `connector_us`; that is null where no method was timed,
    as its time is then in the other parts. Beside these, as they were recorded:
    `schedule_us`, `update_us`, `worker_t_ns`, `execute_model_us`. `requests` is a table
    of kvtax.look.requests. `flames` show the code of processes that were sampled.
    `at_start_us` and `between_us` are the connector's calls by method that were made
    before the first step and between two steps, and are in no step.
    """

    name: str
    header: EngineHeader
    steps: pl.DataFrame
    requests: pl.DataFrame = field(default_factory=lambda: NO_REQUESTS)
    flames: list[Flame] = field(default_factory=list)
    warnings: list[RunWarning] = field(default_factory=list)
    at_start_us: dict[str, float] = field(default_factory=dict)
    between_us: dict[str, float] = field(default_factory=dict)

    @property
    def vllm_version(self) -> str | None:
        return self.header.vllm_version

    @property
    def methods(self) -> list[str]:
        """The columns of the connector's methods; without any, its cost is unknown."""
        return method_columns(self.steps)

    @property
    def with_worker(self) -> pl.DataFrame:
        """The steps that have a worker's record; all of them where no step has one."""
        worker_us = self.steps.get_column("execute_model_us", default=None)
        if worker_us is None or not worker_us.count():
            return self.steps
        return self.steps.filter(worker_us.is_not_null())

    @property
    def covered_us(self) -> float:
        """Time in which steps ran: where steps overlap, their time counts once."""
        step_us = pl.col("step_us").cast(pl.Float64)
        return as_float(self.steps.select(step_us.sum()).item()) * self.alone_share

    @functools.cached_property
    def alone_share(self) -> float:
        """The share of a step's time in which no later step runs.

        Of steps drawn at random, those whose next step was drawn show how much.
        """
        until_next_us = (pl.col("t_ns").shift(-1) - pl.col("t_ns")) / 1e3
        if self.header.every > 1:
            followed = pl.col("step_id").shift(-1) == pl.col("step_id") + 1
            until_next_us = pl.when(followed).then(until_next_us)
        step_us = pl.col("step_us").cast(pl.Float64)
        ran_us, alone_us = (
            self.steps.select(step_us, until_next_us.alias("until_next_us"))
            .drop_nulls()
            .select(
                pl.col("step_us").sum(),
                pl.min_horizontal("step_us", "until_next_us").sum().alias("alone_us"),
            )
            .row(0)
        )
        return alone_us / ran_us if ran_us else 1.0


def read_instances(folder: Path) -> tuple[list[Instance], list[RunWarning]]:
    """All instances below `folder` at once, and what is wrong with the others.

    Raises RecordsError if there are no step records at all.
    """
    found, warnings = discover(folder)
    read = list(one_by_one(found))
    warnings += [one for one in read if isinstance(one, RunWarning)]
    return [one for one in read if isinstance(one, Instance)], warnings


def one_by_one(found: Sequence[ServerFiles]) -> Iterator[Instance | RunWarning]:
    """Each instance, or why it is left out. While the caller has one, the next is read.

    So two are in memory at a time.
    """
    with ThreadPoolExecutor(1) as reader:
        ahead = None
        for one, following in zip_longest(found, found[1:]):
            read = _read(one) if ahead is None else ahead.result()
            ahead = reader.submit(_read, following) if following else None
            yield read


def _read(found: ServerFiles) -> Instance | RunWarning:
    try:
        return read_instance(found)
    except (RecordsError, OSError) as error:
        # Also of a life that is removed meanwhile.
        return Warn.UNREADABLE(found.name, error=error, what="The instance")


def read_instance(found: ServerFiles) -> Instance:
    """Read an instance. Raises RecordsError naming the line of a bad engine file."""
    folder = found.path.parent
    recorded = recorded_steps(found.path)
    ended, of_steps = _ended(recorded.table)
    inside = without_outside_calls(ended)
    steps = _with_parts(inside.steps)
    requests, of_requests = read_requests(folder, steps, found.header)
    sampled, of_stacks = flames(folder, steps)
    warnings = [
        *recorded.warnings,
        *([] if method_columns(steps) else [Warn.CONNECTOR_UNKNOWN()]),
        *of_steps,
        *of_requests,
        *of_stacks,
    ]
    return Instance(
        found.name,
        found.header,
        steps,
        requests,
        sampled,
        warnings,
        inside.at_start_us,
        inside.between_us,
    )


def _ended(steps: pl.DataFrame) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Select the steps that ended, by a clock that went on; warn of the others."""
    ended = steps.filter(pl.col("step_us").is_not_null())
    possible = ended.filter(_possible(ended))
    kept = _longest_run(possible)
    left_out = {
        Warn.OPEN_STEPS: steps.height - ended.height,
        Warn.IMPOSSIBLE_STEPS: ended.height - possible.height,
        Warn.CLOCK: possible.height - kept.height,
    }
    warnings = [warn(count=count) for warn, count in left_out.items() if count]
    if kept.height and kept["cache_size"].null_count() == kept.height:
        warnings.append(Warn.NO_CACHE_SIZE())
    if not kept.height:
        warnings.append(Warn.NO_STEPS())
    return kept, warnings


def _possible(steps: pl.DataFrame) -> pl.Expr:
    """Select steps all of whose times and counts can be."""
    times = [*TIMES, "execute_model_us", *method_columns(steps)]
    calls = [name for name in steps.columns if name.endswith(CALLS)]
    return pl.all_horizontal(
        pl.col(times).fill_null(0).is_between(0, LONGEST_STEP_US),
        pl.col(*ENGINE_COUNTS, *calls).fill_null(0).is_between(0, MOST_COUNTED),
    )


def _longest_run(steps: pl.DataFrame) -> pl.DataFrame:
    """Select the most steps in a row whose clock never goes back."""
    back = (steps["t_ns"] < steps["t_ns"].shift(1)).fill_null(value=False)
    if not back.any():
        return steps
    numbered = steps.with_columns(back.cum_sum().alias("run"))
    longest = numbered["run"].mode().min()
    return numbered.filter(pl.col("run").eq_missing(longest)).drop("run")


def _with_parts(steps: pl.DataFrame) -> pl.DataFrame:
    """Split the times of `steps` into parts that add up to `step_us`."""
    methods = method_columns(steps)
    parts = step_parts(methods)
    # A worker's record may be longer than its step.
    parts["other_us"] = parts["other_us"].clip(lower_bound=0)
    return steps.select(
        *("step_id", "t_ns", *ENGINE_COUNTS, *TIMES, "execute_model_us", "worker_t_ns"),
        (pl.col("t_ns") + (pl.col("step_us") * 1e3).cast(pl.Int64)).alias("end_ns"),
        *(parts[name] for name in STEP_PARTS),
        *(pl.col(name).fill_null(0).cast(pl.Float32) for name in methods),
        *(pl.col(name.removesuffix("_us") + CALLS).fill_null(0) for name in methods),
    )
