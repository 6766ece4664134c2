# SPDX-License-Identifier: Apache-2.0
"""From the files of a trial to its table of decode-only engine steps.

A step is decode-only when it scheduled requests, no prefill tokens and some decode
tokens. It belongs to the phase in which it began; steps before the growth phase
(the dummy runs of an engine start) belong to none and are left out.

The table has one row per step: repeat, step_id, phase (a number of lab.records.phases),
batch (requests scheduled), cache_blocks (|cache| at the end of schedule()), and the
times in us: schedule_us, build_meta_us, step_us, update_us, the worker's five and
overhead_us. A time that was not measured is null.

overhead_us is the part of a step that scheduler and connector make up: schedule_us
(build_meta_us within), update_us, and the connector's calls in the worker. The model
and the waiting for it are not in it, nor is their noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from lab.records import RecordsError
from lab.records.documents import read_document
from lab.records.phases import Phase
from lab.records.requests import PhaseStart, Requests, read_requests
from lab.records.run import RunRecord
from lab.records.step_table import StepFile, read_steps
from lab.records.steps import WORKER_TIMES, EngineHeader, WorkerHeader
from lab.records.trial import TrialRecord

ENGINE_TIMES = ("schedule_us", "build_meta_us", "step_us", "update_us")
COUNTS = ("scheduled", "prefill_tokens", "decode_tokens", "cache_size")
STEP_TIMES = ENGINE_TIMES + WORKER_TIMES
CONNECTOR_TIMES = tuple(name for name in WORKER_TIMES if name != "execute_model_us")


@dataclass(frozen=True)
class LoadedTrial:
    """One server lifetime. `error` says why it has no `steps`; else it is None."""

    config: str
    repeat: int
    error: str | None
    facts: TrialRecord | None  # None if it was never written
    steps: pl.DataFrame | None = None
    requests: Requests | None = None
    engine_steps: int = 0
    worker_steps: int = 0
    engine_without_worker: int = 0
    torn_lines: int = 0


def load_run(run_dir: Path) -> tuple[RunRecord, list[LoadedTrial]]:
    """run.json and the trials of its plan, in the plan's order.

    Raises RecordsError if the directory is no run, or a trial that says it is ok
    has missing, bad or outdated files.
    """
    if not run_dir.is_dir():
        raise RecordsError(f"{run_dir}: no such directory")
    path = run_dir / "run.json"
    if not path.is_file():
        raise RecordsError(f"{path}: missing; a run directory has one, give its path")
    run = read_document(path, RunRecord)
    if not run.plan:
        raise RecordsError(f"{path}: the plan is empty; nothing was run")
    return run, [load_trial(run_dir, trial.config, trial.repeat) for trial in run.plan]


def load_trial(run_dir: Path, config: str, repeat: int) -> LoadedTrial:
    """The trial in RUN_DIR/<config>/r<repeat>, failed ones included."""
    folder = run_dir / config / f"r{repeat}"
    if not (folder / "trial.json").is_file():
        return LoadedTrial(config, repeat, "never finished: no trial.json", None)
    facts = read_document(folder / "trial.json", TrialRecord)
    if facts.status != "ok":
        error = facts.error or f"status {facts.status!r}"
        requests = _requests_if_readable(folder / "requests.jsonl")
        return LoadedTrial(config, repeat, error, facts, requests=requests)
    requests = read_requests(folder / "requests.jsonl")
    if problem := unreconciled(requests):
        return LoadedTrial(config, repeat, problem, facts, requests=requests)
    engine = read_engine_steps(folder, requests.phases)
    worker = read_worker_steps(folder)
    torn = engine.torn_lines + worker.torn_lines + requests.torn_lines
    counts = {"engine_steps": engine.records, "worker_steps": worker.records}
    steps = join_worker(engine.frame, worker.frame).select(
        pl.lit(repeat, dtype=pl.Int16).alias("repeat"),
        *("step_id", "phase", "batch", "cache_blocks", *STEP_TIMES),
        overhead_us().alias("overhead_us"),
    )
    return LoadedTrial(
        config=config,
        repeat=repeat,
        error=None,
        facts=facts,
        steps=steps,
        requests=requests,
        engine_without_worker=int(steps["execute_model_us"].null_count()),
        torn_lines=torn,
        **counts,
    )


def _requests_if_readable(path: Path) -> Requests | None:
    """A failed trial may have left no requests file, or half a one."""
    try:
        return read_requests(path)
    except RecordsError:
        return None


def unreconciled(requests: Requests) -> str | None:
    """Why `scheduled = ok + failed + cancelled` does not hold, or None if it does."""
    if requests.end is None:
        return "the driver was killed: requests.jsonl has no end record"
    end = requests.end
    told = end.ok + end.failed + end.cancelled
    if not (requests.scheduled == end.scheduled == told == len(requests.requests)):
        return (
            f"requests do not reconcile: {requests.scheduled} in the header, "
            f"{end.scheduled} scheduled, {end.ok} ok + {end.failed} failed + "
            f"{end.cancelled} cancelled, {len(requests.requests)} records"
        )
    return None


def phase_starts_ns(phases: list[PhaseStart]) -> list[int | None]:
    """When each Phase begins, None if it never did.

    after_reset begins at the reset itself: steps before it still see the full cache.
    """
    starts: dict[str, int] = {
        phase.name: phase.start_ns if phase.reset_ns is None else phase.reset_ns
        for phase in phases
    }
    return [starts.get(phase.label) for phase in Phase]


def read_engine_steps(folder: Path, phases: list[PhaseStart]) -> StepFile:
    """The decode-only steps of a trial that lie in a phase."""
    files = sorted(folder.glob("engine_step*.jsonl"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise RecordsError(
            f"{folder}: {len(files)} engine step files ({names}); a trial is one "
            "engine core, run the configs one engine at a time"
        )
    path = folder / "engine_step.jsonl"
    # The last phase that began at or before the step; len(Phase) stands for none.
    phase = pl.lit(len(Phase), dtype=pl.UInt8)
    for index, start_ns in enumerate(phase_starts_ns(phases)):
        if start_ns is not None:
            phase = (
                pl.when(pl.col("t_ns") >= start_ns)
                .then(pl.lit(index, dtype=pl.UInt8))
                .otherwise(phase)
            )

    def shape(chunk: pl.LazyFrame) -> pl.LazyFrame:
        decode_only = (
            (pl.col("prefill_tokens") == 0)
            & (pl.col("decode_tokens") > 0)
            & (pl.col("scheduled") > 0)
            & pl.col("step_us").is_not_null()
        )
        return chunk.filter(decode_only, phase < len(Phase)).select(
            "step_id",
            phase.alias("phase"),
            pl.col("scheduled").cast(pl.Int16).alias("batch"),
            pl.col("cache_size").alias("cache_blocks"),
            *ENGINE_TIMES,
        )

    columns = ("step_id", "t_ns", *COUNTS, *ENGINE_TIMES)
    engine = read_steps(path, EngineHeader, columns, shape)
    if engine.records == 0:
        raise RecordsError(f"{path}: no engine steps")
    steps = engine.frame.height
    if steps and engine.frame["cache_blocks"].null_count() == steps:
        raise RecordsError(
            f"{path}: records of step_timing_v1 only, without cache_size; add the "
            "patch step_timing_v2 to the config and run again"
        )
    return replace(engine, frame=_in_step_order(path, engine.frame))


def read_worker_steps(folder: Path) -> StepFile:
    """Worker times by step; of several ranks those of the slowest in that step."""
    files = sorted(folder.glob("worker_step.r*.jsonl"))
    if not files:
        raise RecordsError(
            f"{folder}: no worker_step.r*.jsonl; was step_timing_v1 applied?"
        )
    ranks = []
    for path in files:
        rank = read_steps(path, WorkerHeader, ("step_id", *WORKER_TIMES))
        ranks.append(replace(rank, frame=_in_step_order(path, rank.frame)))
    if len(ranks) == 1:
        return ranks[0]
    every = pl.concat([rank.frame for rank in ranks])
    slowest_first = every.sort("execute_model_us", descending=True, nulls_last=True)
    return StepFile(
        frame=slowest_first.unique("step_id", keep="first").sort("step_id"),
        records=sum(rank.records for rank in ranks),
        torn_lines=sum(rank.torn_lines for rank in ranks),
    )


def overhead_us() -> pl.Expr:
    """What scheduler and connector add to a step; null without a worker record."""
    connector = pl.sum_horizontal(pl.col(name).fill_null(0) for name in CONNECTOR_TIMES)
    measured = pl.col("execute_model_us").is_not_null()
    parts = pl.col("schedule_us") + pl.col("update_us") + connector
    return pl.when(measured).then(parts)


def _in_step_order(path: Path, frame: pl.DataFrame) -> pl.DataFrame:
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
