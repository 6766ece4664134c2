# SPDX-License-Identifier: Apache-2.0
"""From the folder of a run to its trials: how each went, its requests and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from lab.records import RecordsError
from lab.records.documents import read_document
from lab.records.joined_steps import read_worker_steps
from lab.records.requests import Requests, read_requests
from lab.records.run import PLAN_FILE, RunRecord
from lab.records.trial import TrialRecord
from microbench.analysis.speed import Control, read_control, with_slowness
from microbench.analysis.steps import read_engine_steps, step_table
from microbench.analysis.threads import read_threads, with_threads


@dataclass(frozen=True)
class LoadedTrial:
    """One server lifetime. `error` says why it has no `steps`; else it is None.

    `steps` is a table of microbench.analysis.steps, `threads` one of
    microbench.analysis.threads.
    """

    config: str
    repeat: int
    error: str | None
    facts: TrialRecord | None  # None if it was never written
    steps: pl.DataFrame | None = None
    threads: pl.DataFrame | None = None
    control: Control | None = None
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
    path = run_dir / PLAN_FILE
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
    steps = step_table(repeat, engine, worker)
    threads = read_threads(folder / "threads.jsonl", steps)
    control = read_control(steps, threads)
    steps = with_slowness(with_threads(steps, threads), control)
    decode = steps.filter("decode_only")
    return LoadedTrial(
        config=config,
        repeat=repeat,
        error=None,
        facts=facts,
        steps=steps,
        threads=threads,
        control=control,
        requests=requests,
        engine_steps=engine.records,
        worker_steps=worker.records,
        engine_without_worker=int(decode["execute_model_us"].null_count()),
        torn_lines=engine.torn_lines + worker.torn_lines + requests.torn_lines,
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
