# SPDX-License-Identifier: Apache-2.0
"""An instance as it recorded itself: its steps and its requests.

What cannot be read, or is not as it should be, becomes a warning with its count:
nothing is left out in silence, and one bad file does not hide the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import polars as pl

from lab.records import RecordsError
from lab.records.device import DeviceStep, read_device_steps
from lab.records.joined_steps import (
    BY_METHOD,
    CALLS,
    by_method,
    join_worker,
    method_columns,
    ordered,
    read_worker_steps,
)
from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader
from lab.records.warning import RunWarning
from look.found import Found, find, unreadable
from look.kept import kept
from look.requests import NO_REQUESTS, read_requests
from look.stacks import flames
from page.document import Flame

TIMES = ("schedule_us", "update_us", "step_us")
COUNTS = (
    "running",
    "waiting",
    "scheduled",
    "prefill_tokens",
    "decode_tokens",
    "cache_size",
    "free_blocks",
    "preemptions",
)
# A step that took longer than an hour was a clock that jumped.
LONGEST_STEP_US = 3_600e6


@dataclass(frozen=True)
class Instance:
    """One engine lifetime.

    `steps` has a row per step that ended, in order: `step_id`, `t_ns`, `end_ns`, COUNTS
    (null where not recorded), `step_us` and its parts, which add up to it: `model_us`,
    `scheduler_us`, `other_us` and a column for each method of the connector, all of
    which are `connector_us`. Beside these, as they were recorded: `schedule_us`,
    `update_us`, `worker_t_ns`, `execute_model_us`. `requests` is a table of
    look.requests. `device` are the forwards of a device that works beside the host;
    none were recorded where it is empty. `flames` show the code of processes that were
    sampled.
    """

    name: str
    header: EngineHeader
    steps: pl.DataFrame
    requests: pl.DataFrame = field(default_factory=lambda: NO_REQUESTS)
    device: list[DeviceStep] = field(default_factory=list)
    flames: list[Flame] = field(default_factory=list)
    warnings: list[RunWarning] = field(default_factory=list)

    @property
    def vllm_version(self) -> str | None:
        return self.header.vllm_version

    @property
    def methods(self) -> list[str]:
        """The columns of the connector's methods."""
        return method_columns(self.steps)


def read_instances(folder: Path) -> tuple[list[Instance], list[RunWarning]]:
    """All instances below `folder` at once, and what is wrong with the others.

    Raises RecordsError if there are no step records at all.
    """
    found, warnings = find(folder)
    read = list(one_by_one(found))
    warnings += [one for one in read if isinstance(one, RunWarning)]
    return [one for one in read if isinstance(one, Instance)], warnings


def one_by_one(found: Sequence[Found]) -> Iterator[Instance | RunWarning]:
    """Each instance, or why it is left out. While the caller has one, the next is read.

    So two are in memory at a time.
    """
    with ThreadPoolExecutor(1) as reader:
        ahead = None
        for one, following in zip_longest(found, found[1:]):
            read = _read(one) if ahead is None else ahead.result()
            ahead = reader.submit(_read, following) if following else None
            yield read


def _read(found: Found) -> Instance | RunWarning:
    try:
        return read_instance(found)
    except RecordsError as error:
        return unreadable(found.name, error)


def read_instance(found: Found) -> Instance:
    """Raises RecordsError naming file and line if the engine's file is bad."""
    folder = found.path.parent
    steps, warnings = kept(found.path, lambda: _read_steps(found.path))
    requests, of_requests = read_requests(folder, steps, found.header.every)
    device, of_device = _read_device(folder / "device_step.jsonl")
    sampled, of_stacks = flames(folder, steps)
    warnings = [*warnings, *of_requests, *of_device, *of_stacks]
    return Instance(
        found.name, found.header, steps, requests, device, sampled, warnings
    )


def _read_steps(path: Path) -> tuple[pl.DataFrame, list[RunWarning]]:
    """The steps of an Instance, and what is wrong with them."""
    columns = ("step_id", "t_ns", *COUNTS, *TIMES, *BY_METHOD)
    engine = read_steps(path, EngineHeader, columns)
    warnings = _torn(path.name, engine.torn_lines)
    engine = replace(engine, frame=ordered(path, engine.frame))
    joined, told = _joined(path.parent, by_method("scheduler", engine).frame)
    ended, doubtful = _ended(joined)
    return _with_parts(ended), [*warnings, *told, *doubtful]


def _read_device(path: Path) -> tuple[list[DeviceStep], list[RunWarning]]:
    if not path.is_file():
        return [], []
    try:
        lines = read_device_steps(path)
    except RecordsError as error:
        remedy = "What was exposed is not told; see the file"
        return [], [RunWarning("device_unreadable", str(error), remedy)]
    return lines.records, _torn(path.name, lines.torn_lines)


def _joined(
    folder: Path, engine: pl.DataFrame
) -> tuple[pl.DataFrame, list[RunWarning]]:
    """The engine's steps with their worker's times, as far as there are any."""
    try:
        worker = read_worker_steps(folder)
    except RecordsError as error:
        missing = RunWarning(
            "no_worker",
            f"no records of a worker ({error}): its calls and the model count as other",
            "Apply step_timing_v2, and let the workers write to the same folder",
        )
        return engine.with_columns(
            pl.lit(None, pl.Float32).alias("execute_model_us"),
            pl.lit(None, pl.Int64).alias("worker_t_ns"),
        ), [missing]
    joined = join_worker(engine, worker.frame)
    warnings = _torn("worker_step", worker.torn_lines)
    alone = int(joined["execute_model_us"].null_count())
    # The last steps of an engine that is killed, and those that schedule nothing.
    if alone > max(10, joined.height // 100):
        warnings.append(
            RunWarning(
                "steps_without_worker",
                f"{alone:,} of {joined.height:,} steps have no record of a worker",
                "See whether the worker's file ends early; its calls are missing there",
            )
        )
    return joined, warnings


def _ended(steps: pl.DataFrame) -> tuple[pl.DataFrame, list[RunWarning]]:
    """The steps that ended, by a clock that went on; and a warning for the others."""
    warnings = []
    ended = steps.filter(pl.col("step_us").is_not_null())
    if open_steps := steps.height - ended.height:
        warnings.append(
            RunWarning(
                "open_steps",
                f"{open_steps:,} steps were scheduled and never ended",
                "They are left out; the engine was stopped, or failed, in them",
            )
        )
    kept = _longest_run(ended.filter(pl.col("step_us").is_between(0, LONGEST_STEP_US)))
    if jumped := ended.height - kept.height:
        warnings.append(
            RunWarning(
                "clock",
                f"the clock jumped: {jumped:,} steps took less than nothing or over an "
                "hour, or stand before or after a step that begins before the last",
                "They are left out, the longest stretch is kept; look at the host's "
                "clock",
            )
        )
    if kept.height and kept["cache_size"].null_count() == kept.height:
        warnings.append(
            RunWarning(
                "no_cache_size",
                "records of step_timing_v1 alone: |cache|, the connector's calls and "
                "update_us are not in them",
                "Apply step_timing_v2 as well: python apply_step_timing_v2.py --apply",
            )
        )
    if not kept.height:
        warnings.append(
            RunWarning(
                "no_steps",
                "no engine step has ended",
                "Send the server a request; it records a step for each",
            )
        )
    return kept, warnings


def _longest_run(steps: pl.DataFrame) -> pl.DataFrame:
    """The most steps in a row whose clock never goes back."""
    back = (pl.col("t_ns") < pl.col("t_ns").shift(1)).fill_null(value=False)
    numbered = steps.with_columns(back.cum_sum().alias("run"))
    longest = numbered["run"].mode().min()
    return numbered.filter(pl.col("run").eq_missing(longest)).drop("run")


def _with_parts(steps: pl.DataFrame) -> pl.DataFrame:
    """`steps` with its times as parts that add up to `step_us`."""
    methods = method_columns(steps)
    of = {
        side: pl.sum_horizontal(
            pl.col(name).fill_null(0) for name in methods if name.startswith(side)
        )
        if any(name.startswith(side) for name in methods)
        else pl.lit(0.0)
        for side in ("scheduler", "worker")
    }
    known = pl.col("execute_model_us").fill_null(0)
    # Calls between two steps are in no part of either's own time, so it may not go
    # below zero for them; `other_us` takes what is over.
    model = (known - of["worker"]).clip(lower_bound=0)
    scheduler = pl.col("schedule_us").fill_null(0) + pl.col("update_us").fill_null(0)
    own = (scheduler - of["scheduler"]).clip(lower_bound=0)
    connector = of["scheduler"] + of["worker"]
    return steps.select(
        *("step_id", "t_ns", *COUNTS, *TIMES, "execute_model_us", "worker_t_ns"),
        (pl.col("t_ns") + (pl.col("step_us") * 1e3).cast(pl.Int64)).alias("end_ns"),
        model.cast(pl.Float32).alias("model_us"),
        own.cast(pl.Float32).alias("scheduler_us"),
        connector.cast(pl.Float32).alias("connector_us"),
        (pl.col("step_us") - model - own - connector)
        .cast(pl.Float32)
        .alias("other_us"),
        *(pl.col(name).fill_null(0).cast(pl.Float32) for name in methods),
        *(pl.col(name.removesuffix("_us") + CALLS).fill_null(0) for name in methods),
    )


def _torn(name: str, lines: int) -> list[RunWarning]:
    if not lines:
        return []
    told = f"{name}: {lines} torn last line{'s'[: lines > 1]} left out"
    return [RunWarning("torn_lines", told, "Nothing: a stopped writer leaves one")]
