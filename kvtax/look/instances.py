# SPDX-License-Identifier: Apache-2.0
"""An instance as it recorded itself: its steps, requests, device and samples.

Everything that cannot be read, or is not as it should be, becomes a warning with its
count: one bad file does not hide the others.

Reading JSON takes most of the time. So the steps of a server that has ended are kept as
Parquet beside its records, with the sizes and times of the files that they were read
from, and read again only if these change. The file may be deleted at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import msgspec
import polars as pl

from kvtax.look.discover import (
    ServerFiles,
    discover,
    left_out,
    stranger,
    unreadable,
)
from kvtax.look.flames import flames
from kvtax.look.requests import NO_REQUESTS, read_requests
from kvtax.records import RecordsError
from kvtax.records.steps import (
    ENGINE_COUNTS,
    LONGEST_STEP_US,
    METHOD_FIELDS,
    DeviceStep,
    EngineHeader,
    WorkerHeader,
    another_life,
    read_device_steps,
)
from kvtax.records.warning import RunWarning
from kvtax.report.document import Flame
from kvtax.stats.distribution import as_float
from kvtax.steps.step_table import (
    BY_METHOD,
    CALLS,
    StepFile,
    by_method,
    join_worker,
    method_columns,
    newest_header,
    ordered,
    read_rank,
    read_steps,
    slowest,
    worker_files,
)

TIMES = ("schedule_us", "update_us", "step_us")
# Times of single calls that are recorded beside those by method, or in their place.
SINGLE_CALLS = {
    field: f"{side}.{method}_us"
    for side, fields in METHOD_FIELDS.items()
    for method, field in fields.items()
}
# As many of a worker's steps show whether they are the engine's.
SAMPLED_STEPS = 10_000
NOTHING = pl.Series(dtype=pl.Float32)
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
    of kvtax.look.requests. `device` are the forwards of a device that works beside the
    host; none were recorded where it is empty. `flames` show the code of processes that
    were sampled.
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
        """The columns of the connector's methods; without any, its cost is unknown."""
        return method_columns(self.steps)

    @property
    def covered_us(self) -> float:
        """Time in which steps ran: where steps overlap, their time counts once.

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
        share = alone_us / ran_us if ran_us else 1.0
        return as_float(self.steps.select(step_us.sum()).item()) * share


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
        return unreadable(found.name, error)


def read_instance(found: ServerFiles) -> Instance:
    """Read an instance. Raises RecordsError naming the line of a bad engine file."""
    folder = found.path.parent
    steps, warnings = cached_steps(found.path, lambda: _read_steps(found))
    requests, of_requests = read_requests(folder, steps, found.header)
    device, of_device = _read_device(folder / "device_step.jsonl", found.header)
    sampled, of_stacks = flames(folder, steps)
    warnings = [*warnings, *of_requests, *of_device, *of_stacks]
    return Instance(
        found.name, found.header, steps, requests, device, sampled, warnings
    )


def _read_steps(found: ServerFiles) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Read the steps of an Instance; warn of what is wrong with them."""
    path = found.path
    columns = ("step_id", "t_ns", "build_meta_us", *ENGINE_COUNTS, *TIMES, *BY_METHOD)
    engine = read_steps(path, EngineHeader, columns, strict=False)
    warnings = [*left_out(path.name, engine), *_not_timed("scheduler", found.header)]
    engine = replace(engine, frame=ordered(path, engine.frame))
    joined, told = _joined(found, by_method("scheduler", engine).frame)
    timed, untimed = _with_methods(joined)
    ended, doubtful = _ended(timed)
    return _with_parts(ended), [*warnings, *told, *untimed, *doubtful]


def _read_device(
    path: Path, header: EngineHeader
) -> tuple[list[DeviceStep], list[RunWarning]]:
    if not path.exists():
        return [], []
    try:
        lines = read_device_steps(path, strict=False)
    except RecordsError as error:
        remedy = "What was exposed is not told; see the file"
        return [], [RunWarning("device_unreadable", path.name, str(error), remedy)]
    if why := another_life(header, lines.header, process=False):
        return [], [stranger(path, why)]
    return lines.records, left_out(path.name, lines)


def _ranks(
    found: ServerFiles, engine: pl.DataFrame
) -> tuple[list[StepFile], list[RunWarning]]:
    """Read the workers' times by rank, those of this life. Raises RecordsError."""
    ranks, warnings = [], []
    for path in worker_files(found.path.parent):
        try:
            header = newest_header(path, WorkerHeader)
            rank = read_rank(path, strict=False)
        except RecordsError as error:
            warnings.append(unreadable(path.name, error, "The file is left out"))
            continue
        why = another_life(found.header, header, process=False)
        if why := why or _other_steps(engine, rank.frame):
            warnings.append(stranger(path, why))
            continue
        ranks.append(rank)
        warnings += _not_timed("worker", header)
    return ranks, _each_once(warnings)


def _not_timed(side: str, header: EngineHeader | WorkerHeader) -> list[RunWarning]:
    """Warn of methods that the recorder could not time."""
    remedy = "Their time counts as scheduler, model or other"
    return [
        RunWarning("not_timed", f"{side}.{method}", f"not timed: {why}", remedy)
        for method, why in header.not_timed.items()
    ]


def _each_once(warnings: list[RunWarning]) -> list[RunWarning]:
    return list(dict.fromkeys(warnings))


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


def _joined(
    found: ServerFiles, engine: pl.DataFrame
) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Join the engine's steps with their worker's times, as far as there are any."""
    warnings: list[RunWarning] = []
    why = "see the other warnings"
    try:
        ranks, warnings = _ranks(found, engine)
    except RecordsError as error:
        ranks, why = [], str(error)
    if not ranks:
        missing = RunWarning(
            "no_worker",
            "",
            f"no records of a worker ({why}): its calls and the model count as other",
            "Apply step_timing_v2, and let the workers write to the same folder",
        )
        return engine.with_columns(
            pl.lit(None, pl.Float32).alias("execute_model_us"),
            pl.lit(None, pl.Int64).alias("worker_t_ns"),
        ), [*warnings, missing]
    worker = slowest(ranks)
    warnings += left_out("worker_step", worker)
    joined = join_worker(engine, worker.frame)
    alone = int(joined["execute_model_us"].null_count())
    # The last steps of an engine that is killed, and those that schedule nothing.
    if alone > max(10, joined.height // 100):
        warnings.append(
            RunWarning(
                "steps_without_worker",
                "",
                f"{alone:,} of {joined.height:,} steps have no record of a worker",
                "See whether the worker's file ends early; its calls are missing there",
            )
        )
    return joined, warnings


def _with_methods(
    steps: pl.DataFrame,
) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Take SINGLE_CALLS for the methods of a side whose methods were not timed."""
    timed = {name.partition(".")[0] for name in method_columns(steps)}
    single = {
        field: name
        for field, name in SINGLE_CALLS.items()
        if name.partition(".")[0] not in timed
        and steps.get_column(field, default=NOTHING).count()
    }
    warnings = []
    if single:
        sides = sorted({name.partition(".")[0] for name in single.values()})
        calls = ", ".join(name.rpartition(".")[2][:-3] for name in single.values())
        warnings.append(
            RunWarning(
                "few_methods",
                "",
                f"of the connector's calls in the {' and the '.join(sides)} only "
                f"{calls} were timed: all others count as scheduler, model or other",
                "Record with today's step_timing_v2, which times every method",
            )
        )
    elif not timed:
        warnings.append(
            RunWarning(
                "connector_unknown",
                "",
                "no call of a connector was timed: what it costs is unknown",
                "Nothing if the server has no connector; else record with today's "
                "step_timing_v2, whose header names what could not be timed",
            )
        )
    return steps.with_columns(
        *(pl.col(field).alias(name) for field, name in single.items()),
        *(
            pl.col(field).is_not_null().cast(pl.Float32).alias(name[:-3] + CALLS)
            for field, name in single.items()
        ),
    ), warnings


def _ended(steps: pl.DataFrame) -> tuple[pl.DataFrame, list[RunWarning]]:
    """Select the steps that ended, by a clock that went on; warn of the others."""
    warnings = []
    ended = steps.filter(pl.col("step_us").is_not_null())
    if open_steps := steps.height - ended.height:
        warnings.append(
            RunWarning(
                "open_steps",
                "",
                f"{open_steps:,} steps were scheduled and never ended",
                "They are left out; the engine was stopped, or failed, in them",
            )
        )
    possible = ended.filter(_possible(ended))
    if impossible := ended.height - possible.height:
        warnings.append(
            RunWarning(
                "impossible_steps",
                "",
                f"{impossible:,} steps took less than nothing or over an hour, or have "
                "counts below zero",
                "They are left out; look at the host's clock",
            )
        )
    kept = _longest_run(possible)
    if jumped := possible.height - kept.height:
        warnings.append(
            RunWarning(
                "clock",
                "",
                f"the clock jumped: {jumped:,} steps stand before or after a step that "
                "begins before the last",
                "They are left out, the longest stretch is kept; look at the host's "
                "clock",
            )
        )
    if kept.height and kept["cache_size"].null_count() == kept.height:
        warnings.append(
            RunWarning(
                "no_cache_size",
                "",
                "records without |cache|: the scheduler has no block pool, or "
                "an older recorder wrote them",
                "Record again with kvtax-probe, or read what is there",
            )
        )
    if not kept.height:
        warnings.append(
            RunWarning(
                "no_steps",
                "",
                "no engine step has ended",
                "Send the server a request; it records a step for each",
            )
        )
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
        *("step_id", "t_ns", *ENGINE_COUNTS, *TIMES, "execute_model_us", "worker_t_ns"),
        (pl.col("t_ns") + (pl.col("step_us") * 1e3).cast(pl.Int64)).alias("end_ns"),
        model.cast(pl.Float32).alias("model_us"),
        own.cast(pl.Float32).alias("scheduler_us"),
        (connector if methods else pl.lit(None)).cast(pl.Float32).alias("connector_us"),
        (pl.col("step_us") - model - own - connector)
        .cast(pl.Float32)
        .alias("other_us"),
        *(pl.col(name).fill_null(0).cast(pl.Float32) for name in methods),
        *(pl.col(name.removesuffix("_us") + CALLS).fill_null(0) for name in methods),
    )


# What the table of steps looks like; counted up when that changes.
VERSION = 4
FEWEST_STEPS = 100_000
# A server that still writes changes its files four times a second.
QUIET_S = 10.0
PATTERNS = ("engine_step*.jsonl*", "worker_step.r*.jsonl*")

Read = tuple[pl.DataFrame, list[RunWarning]]


def cached_steps(engine: Path, read: Callable[[], Read]) -> Read:
    """Read steps of an `engine` file and its workers', and what is wrong with them, as
    `read` gives them."""
    folder, path = engine.parent, engine.with_suffix(".parquet")
    key = _key(folder)
    # polars refuses a path that is no UTF-8 with a TypeError.
    with suppress(OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError):
        told = pl.read_parquet_metadata(path)
        if told["kvtax_key"] == key:
            warnings = msgspec.json.decode(
                told["kvtax_warnings"], type=list[RunWarning]
            )
            return pl.read_parquet(path), warnings
    steps, warnings = read()
    # Not if the files have changed meanwhile, or may change any moment.
    if steps.height >= FEWEST_STEPS and _key(folder) == key and _quiet(folder):
        _write_cache(path, key, steps, warnings)
    return steps, warnings


def _write_cache(
    path: Path, key: str, steps: pl.DataFrame, warnings: list[RunWarning]
) -> None:
    """Write the file, whole or not at all; nothing where that cannot be."""
    partial = path.with_name(f"{path.name}.partial")
    told = {"kvtax_key": key, "kvtax_warnings": msgspec.json.encode(warnings).decode()}
    try:
        # Read whole, so statistics of its parts would serve nobody.
        steps.write_parquet(partial, compression="lz4", statistics=False, metadata=told)
        partial.replace(path)
    except (OSError, TypeError):
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()
    )


def _key(folder: Path) -> str:
    facts = [
        (path.name, (told := path.stat()).st_size, told.st_mtime_ns)
        for path in _files(folder)
    ]
    return msgspec.json.encode([VERSION, *facts]).decode()


def _quiet(folder: Path) -> bool:
    newest_s = [path.stat().st_mtime for path in _files(folder)]
    return time.time() - max(newest_s, default=0) > QUIET_S
