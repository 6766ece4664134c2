# SPDX-License-Identifier: Apache-2.0
"""The plan of an experiment: its runs in order, and its trace, in the run folder.

The order is A B C, then C B A, so that a drift hits all arms alike.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvtax import run_folder
from kvtax.engine import provenance
from kvtax.engine.published import published
from kvtax.records import RecordsError
from kvtax.records.files import read_document, write_document
from kvtax.run_folder import RunFolderError

from kvtax_fleet.experiment.config import Arm, Experiment
from kvtax_fleet.experiment.workload import make_workload
from kvtax_fleet.launch.instance_settings import InstanceSettings
from kvtax_fleet.records.arm import (
    ArmRecord,
    ExperimentRecord,
    PlannedArm,
    TraceFacts,
)
from kvtax_fleet.replay.http_link import Model, check_lengths
from kvtax_fleet.replay.sessions import group
from kvtax_fleet.trace import read_trace

TRACE = "trace.jsonl.gz"
PLAN_FILE = "experiment.json"
# Keys of the provenance on which a run in virtual time depends.
VIRTUAL_PROVENANCE = (
    "vllm_version",
    "python_version",
    "package_versions",
    "git_commit",
    "git_dirty",
)


class ExperimentError(Exception):
    """The experiment cannot start; the message says what to do."""

    exit_code = 2


@dataclass(frozen=True)
class Run:
    """One arm at one concurrency in one repeat: a lifetime of the whole fleet.

    `concurrency` is in requests per instance. `baseline` and `same_as` are labels of
    other runs at this concurrency: the arm to compare with, and the arm that is the
    very same (an A/A pair): the baseline, else the first one in the file.
    """

    label: str
    arm: Arm
    concurrency: int
    repeat: int
    baseline: str
    same_as: str | None

    @property
    def name(self) -> str:
        """Path of the run's folder below the experiment's."""
        return f"{self.label}/r{self.repeat}"


@dataclass(frozen=True)
class PlannedRun:
    """A run, the fields of its arm.json that are known before it, and its folder."""

    run: Run
    planned: PlannedArm
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Return whether the folder holds a run that went well."""
        return is_finished(self.folder)


def is_finished(folder: Path) -> bool:
    """Check whether the folder holds a run that went well."""
    try:
        record: ArmRecord = read_document(folder / "arm.json", ArmRecord)
    except RecordsError:
        return False
    return record.status == "ok"


def plan(experiment: Experiment, virtual: bool = False) -> list[Run]:
    """List all runs in the order in which they are made.

    In virtual time an arm that equals an earlier one is left out: it would give the
    same bytes again.
    """
    forwards = [
        (concurrency, name)
        for concurrency in experiment.concurrency
        for name in experiment.arms
        if not (virtual and _same_as(experiment, name, concurrency))
    ]
    return [
        Run(
            label(name, concurrency),
            experiment.arms[name],
            concurrency,
            repeat,
            label(experiment.baseline, concurrency),
            _same_as(experiment, name, concurrency),
        )
        for repeat in range(experiment.repeats)
        for concurrency, name in (forwards if repeat % 2 == 0 else forwards[::-1])
    ]


def label(arm: str, concurrency: int) -> str:
    """Name an arm at a concurrency, as folders and reports do."""
    return f"{arm}@{concurrency}"


def _same_as(experiment: Experiment, name: str, concurrency: int) -> str | None:
    for other in (experiment.baseline, *experiment.arms):
        if other == name:
            return None
        if experiment.arms[other] == experiment.arms[name]:
            return label(other, concurrency)
    return None


def prepare(experiment: Experiment, out: Path, virtual: bool) -> list[PlannedRun]:
    """Write trace and plan into `out`; return all runs in order.

    Raises ExperimentError, RunFolderError, TraceError, ReplayError if a request is too
    long, and leaves `out` as it was.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-trace-") as aside:
        made = Path(aside) / TRACE
        facts = make_workload(
            experiment.workload,
            made,
            not experiment.open_loop,
            experiment.seed,
        )
        check_slots(experiment, facts.sessions)
        sessions = group(read_trace(made))
        longest = _longest_tokens(experiment.instance_settings)
        check_lengths(sessions, Model(f"profile {experiment.profile}", longest))
        versions = provenance.collect({}, "kvtax fleet run")
        if virtual:
            versions = {name: versions[name] for name in VIRTUAL_PROVENANCE}
        runs = [
            PlannedRun(
                run,
                planned_arm(experiment, run, facts, versions, virtual),
                out / run.name,
            )
            for run in plan(experiment, virtual)
        ]
        _keep_plan(out, experiment, facts, versions, virtual)
        shutil.move(made, out / TRACE)
    return runs


def _longest_tokens(settings: InstanceSettings) -> int:
    """Return the tokens of the longest request; one beyond the KV cache never runs."""
    if settings.num_blocks is None:
        return settings.max_model_len
    # vLLM keeps one block for itself.
    held = (settings.num_blocks - 1) * settings.block_size
    return min(settings.max_model_len, held)


def check_slots(experiment: Experiment, sessions: int) -> None:
    """Raise ExperimentError if `sessions` cannot fill the closed loop's slots."""
    most = max(experiment.concurrency)
    slots = most * experiment.instances
    if not experiment.open_loop and sessions < slots:
        raise ExperimentError(
            f"{sessions} sessions cannot fill {slots} slots (`concurrency` {most} at "
            f"{experiment.instances} instances), as each has one request in flight: "
            "raise `copies` in [workload], or lower `concurrency`"
        )


def planned_arm(
    experiment: Experiment,
    run: Run,
    facts: TraceFacts,
    versions: dict[str, Any],
    virtual: bool = False,
) -> PlannedArm:
    """Describe a run for arm.json, as far as it is known before it."""
    spec = experiment.fleet_spec(run.arm)
    return PlannedArm(
        experiment=experiment.name,
        arm=run.label,
        repeat=run.repeat,
        policy=run.arm.policy,
        parameters=run.arm.parameters,
        connector=run.arm.connector,
        report=spec.connector.report,
        cache_state=run.arm.cache_state,
        concurrency=run.concurrency,
        baseline=run.baseline,
        same_as=run.same_as,
        open_loop=experiment.open_loop,
        time_scale=experiment.time_scale,
        time_factor=experiment.time_factor,
        virtual=virtual,
        trace=facts,
        profile=published(msgspec.to_builtins(spec.settings)),
        versions=versions,
    )


def _keep_plan(
    out: Path,
    experiment: Experiment,
    facts: TraceFacts,
    versions: dict[str, Any],
    virtual: bool,
) -> None:
    """Write the plan into `out`, or check that it equals the plan that is resumed.

    Raises RunFolderError.
    """
    file = out / PLAN_FILE
    now = ExperimentRecord(
        experiment=published(msgspec.to_builtins(experiment)),
        trace=facts,
        plan=[run.name for run in plan(experiment, virtual)],
        versions=versions,
    )
    if file.exists():
        earlier = run_folder.read_plan(file)
        # The host matters to runs in real time alone.
        in_real_time = "host" in (earlier.get("versions") or {})
        if in_real_time != ("host" in versions):
            time = "real" if in_real_time else "virtual"
            raise RunFolderError(f"cannot resume {out}: its runs are in {time} time")
        run_folder.check_resumable(
            out,
            earlier,
            msgspec.to_builtins(now),
            plan_keys=("experiment", "trace", "plan"),
            provenance_keys=set(run_folder.SAME_MACHINE_AND_CODE) & set(versions),
            provenance="versions",
        )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_document(file, now)
