# SPDX-License-Identifier: Apache-2.0
"""Load the trials of a run folder: outcome, requests and steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from kvtax.records import RecordsError
from kvtax.records.files import read_document
from kvtax.records.requests import Phase, Requests, read_requests
from kvtax.records.run import PLAN_FILE, RunRecord, TrialRecord
from kvtax.records.steps import STEPS, only_life
from kvtax.steps.forwards import FORWARDS, with_forwards
from kvtax.steps.life import whole_steps
from kvtax.steps.trial_steps import read_holds, trial_steps

# Methods that the recorder could not time, and the times that have them in.
NOT_TIMED = "not_timed"
SUMS = ("connector_us", "worker_calls_us", "overhead_us")


@dataclass(frozen=True)
class LoadedTrial:
    """One server lifetime. `error` says why it has no `steps`; else it is None.

    `steps` and `readings` are tables of kvtax.steps.trial_steps. A trial whose requests
    were sent `late` has no steps of growth and plateau, where the load is open: only
    those of the holds.
    """

    config: str
    repeat: int
    error: str | None
    facts: TrialRecord | None  # None if it was never written
    steps: pl.DataFrame | None = None
    readings: pl.DataFrame | None = None
    requests: Requests | None = None
    engine_steps: int = 0
    worker_steps: int = 0
    engine_without_worker: int = 0
    torn_lines: int = 0

    @property
    def late(self) -> bool:
        """Return whether the driver exceeded its budget for the send lag."""
        return bool(self.requests and self.requests.end and not self.requests.end.valid)


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
    sleeps_us = run.profile.forward_us if run.profile.null_model else None
    return run, [
        load_trial(run_dir, trial.config, trial.repeat, sleeps_us) for trial in run.plan
    ]


def load_trial(
    run_dir: Path, config: str, repeat: int, sleeps_us: float | None = None
) -> LoadedTrial:
    """Load the trial in RUN_DIR/<config>/r<repeat>, failed or not.

    The null model sleeps `sleeps_us` in each step, where the trial does not say more.
    """
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
    life = only_life(folder)
    recorded = whole_steps(life)
    _require_cache_size(life, recorded.table)
    steps = trial_steps(repeat, recorded.table, requests.phases)
    if any(warning.kind == NOT_TIMED for warning in recorded.warnings):
        # A sum without one of its parts says nothing.
        steps = steps.with_columns(
            pl.lit(None, pl.Float32).alias(sum_) for sum_ in SUMS
        )
    steps = with_forwards(steps, folder / FORWARDS, sleeps_us)
    readings = read_holds(repeat, steps, requests, life / "threads.jsonl")
    if requests.end and not requests.end.valid:
        steps = steps.filter(~pl.col("phase").is_in([Phase.GROWTH, Phase.PLATEAU]))
    decode = steps.filter("decode_only")
    return LoadedTrial(
        config=config,
        repeat=repeat,
        error=None,
        facts=facts,
        steps=steps,
        readings=readings,
        requests=requests,
        engine_steps=recorded.table.height,
        worker_steps=recorded.worker_records,
        engine_without_worker=int(decode["execute_model_us"].null_count()),
        torn_lines=recorded.torn_lines + requests.torn_lines,
    )


def _require_cache_size(life: Path, steps: pl.DataFrame) -> None:
    if not steps.height:
        raise RecordsError(f"{life / STEPS}: no engine steps")
    if steps["cache_size"].null_count() == steps.height:
        raise RecordsError(
            f"{life / STEPS}: records without cache_size; the scheduler has no block "
            "pool of vLLM's, so nothing can be held against |cache|"
        )


def _requests_if_readable(path: Path) -> Requests | None:
    """Read the requests of a failed trial; None if the file is missing or torn."""
    try:
        return read_requests(path)
    except RecordsError:
        return None


def unreconciled(requests: Requests) -> str | None:
    """Return why `scheduled = ok + failed + cancelled` fails, None if it holds."""
    if requests.end is None:
        return "the driver was killed: requests.jsonl has no end record"
    end = requests.end
    counted = end.ok + end.failed + end.cancelled
    if not (requests.scheduled == end.scheduled == counted == len(requests.requests)):
        return (
            f"requests do not reconcile: {requests.scheduled} in the header, "
            f"{end.scheduled} scheduled, {end.ok} ok + {end.failed} failed + "
            f"{end.cancelled} cancelled, {len(requests.requests)} records"
        )
    return None
