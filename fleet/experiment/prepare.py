# SPDX-License-Identifier: Apache-2.0
"""What is there before the first run: the trace and the plan, in the run folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from fleet.experiment.arm import TRACE
from fleet.experiment.config import Experiment, Workload
from fleet.experiment.fleets import spec
from fleet.experiment.plan import Run, plan
from fleet.experiment.virtual import PROVENANCE
from fleet.experiment.workload import make_workload
from fleet.trace.twin import twin
from lab import run_folder
from lab.paths import REPOSITORY
from lab.records.arm import OUR_PROXY, PlannedArm, TraceFacts
from lab.records.documents import write_document
from lab.records.experiment import ExperimentRecord
from lab.run_folder import RunFolderError
from lab.serving import provenance, vllm_router

TWIN = "twin.jsonl.gz"
PLAN_FILE = "experiment.json"


class ExperimentError(Exception):
    """The experiment cannot start; the message says what to do."""


def prepare(
    experiment: Experiment,
    runs: list[Run],
    out: Path,
    virtual: bool,
    hosts: int | None,
) -> list[PlannedArm]:
    """Put trace and plan into `out`; what arm.json will say of each of `runs`.

    Raises ExperimentError, RunFolderError, TraceError, and leaves `out` as it was.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-trace-") as aside:
        made = Path(aside) / TRACE
        facts = make_workload(
            experiment.workload,
            source(experiment.workload, Path(aside)),
            made,
            not experiment.open_loop,
            experiment.seed,
        )
        check_slots(experiment, facts.sessions)
        versions = provenance.collect({}, "python -m fleet.experiment")
        if virtual:
            versions = {name: versions[name] for name in PROVENANCE}
        arms = [planned_arm(experiment, run, facts, versions, virtual) for run in runs]
        _keep_plan(out, experiment, facts, versions, hosts)
        shutil.move(made, out / TRACE)
    return arms


def source(workload: Workload, aside: Path) -> Path:
    """The trace to cut from; one that is made up is put `aside`. Raises TraceError."""
    if workload.twin is None:
        return REPOSITORY / workload.trace
    twin(workload.twin, aside / TWIN)
    return aside / TWIN


def check_slots(experiment: Experiment, sessions: int) -> None:
    """Raises ExperimentError if `sessions` cannot fill the closed loop's slots."""
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
    versions: dict,
    virtual: bool = False,
) -> PlannedArm:
    launched = spec(experiment, run.arm) if experiment.profile is not None else None
    ours = run.arm.router == OUR_PROXY
    return PlannedArm(
        experiment=experiment.name,
        arm=run.label,
        repeat=run.repeat,
        router=OUR_PROXY if ours else f"{run.arm.router} {vllm_router.version()}",
        policy=run.arm.policy,
        parameters=run.arm.parameters,
        connector=run.arm.connector,
        report=launched and launched.connector.report,
        cache_state=run.arm.cache_state if ours else None,
        concurrency=run.concurrency,
        baseline=run.baseline,
        same_as=run.same_as,
        open_loop=experiment.open_loop,
        time_scale=experiment.time_scale,
        time_factor=experiment.time_factor,
        virtual=virtual,
        trace=facts,
        profile=launched and msgspec.to_builtins(launched.settings),
        versions=versions,
    )


def _keep_plan(
    out: Path,
    experiment: Experiment,
    facts: TraceFacts,
    versions: dict,
    hosts: int | None,
) -> None:
    """Write the plan into `out`, or check that it is the one that is resumed.

    Raises RunFolderError.
    """
    file = out / PLAN_FILE
    now = ExperimentRecord(
        experiment=msgspec.to_builtins(experiment),
        trace=facts,
        plan=[run.folder for run in plan(experiment)],
        hosts=hosts,
        versions=versions,
    )
    if file.exists():
        if (begun := begun_on(out)) != hosts:
            on = f"with --ray, on {begun} hosts" if begun else "without --ray"
            raise RunFolderError(f"cannot resume {out}: its fleets are made {on}")
        run_folder.check_resumable(
            out,
            run_folder.read_plan(file),
            msgspec.to_builtins(now),
            plan_keys=("experiment", "trace", "plan"),
            provenance_keys=set(run_folder.SAME_MACHINE_AND_CODE) & set(versions),
            provenance="versions",
        )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_document(file, now)


def begun_on(out: Path) -> int | None:
    """On how many hosts each fleet is of the run that is resumed."""
    file = out / PLAN_FILE
    return run_folder.read_plan(file).get("hosts") if file.exists() else None
