# SPDX-License-Identifier: Apache-2.0
"""All runs of an experiment: in real time, in virtual time, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvtax import run_folder
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.hosts import Cluster
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document

from kvtax_fleet.experiment.arm_run import make_run
from kvtax_fleet.experiment.config import Experiment, check_arms, read_experiment
from kvtax_fleet.experiment.experiment_plan import (
    PLAN_FILE,
    TRACE,
    ExperimentError,
    PlannedRun,
    prepare,
)
from kvtax_fleet.experiment.virtual import check_virtual, make_here, make_on_hosts
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.records.arm import ArmRecord


def run_experiment(
    config: Path,
    out: Path | None = None,
    resume: bool = False,
    virtual: bool = False,
    ray: Cluster | None = None,
) -> Path:
    """Make all runs of the experiment that are missing; return the run folder.

    Raises ExperimentError, RunFolderError, ConfigError, TraceError, HostsError and what
    launching raises. `--resume` goes on from there.
    """
    if ray is not None and not virtual:
        raise ExperimentError(
            "--ray is for --virtual: a fleet in real time runs on this machine"
        )
    experiment = read_experiment(config)
    out = run_folder.choose(out, experiment.name, PLAN_FILE, resume)
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(out))
        check_arms(experiment)
        if virtual:
            check_virtual(experiment)
        else:
            _check_real(experiment)
            stack.enter_context(machine_lock())
            settings = experiment.instance_settings
            preflight.check_machine(settings, experiment.instances)
        runs = prepare(experiment, out, virtual)
        missing = [run for run in runs if not (resume and run.is_finished)]
        workshop = stack.enter_context(Workshop(out / "workshop"))
        if ray is not None:
            made = make_on_hosts(ray, experiment, missing, out / TRACE)
        elif virtual:
            made = make_here(experiment, missing, out / TRACE, workshop)
        else:
            made = _make_in_turn(experiment, missing, out / TRACE, workshop)
        for number, run in enumerate(made, len(runs) - len(missing) + 1):
            print(f"{number}/{len(runs)}  {outcome(run.folder)}", flush=True)
    return out


def _make_in_turn(
    experiment: Experiment,
    runs: list[PlannedRun],
    trace: Path,
    workshop: Workshop,
) -> Iterator[PlannedRun]:
    """Make the runs in real time; yield each once its folder has the arm.json."""
    for run in runs:
        make_run(run, experiment, trace, workshop)
        yield run


def _check_real(experiment: Experiment) -> None:
    """Raise ConfigError if the experiment runs in virtual time only."""
    for name, arm in experiment.arms.items():
        if arm.transfer is not None:
            raise ConfigError(f"arm {name!r}: `transfer` is for --virtual")
        if arm.cache_state == "exact":
            raise ConfigError(f"arm {name!r}: `cache_state` exact is for --virtual")


def outcome(folder: Path) -> str:
    """Describe how a run went, for the console."""
    record = read_document(folder / "arm.json", ArmRecord)
    text = f"{record.arm:24} r{record.repeat}  {record.status}"
    if record.replay_s is not None:
        text += f"  ready {record.ready_s:.0f} s, replay {record.replay_s:.0f} s"
    if (machine := record.machine) is not None:
        text += f", cores {machine.busy_mean:.0%} busy"
        if machine.engine_excess is not None:
            text += f", forwards {machine.engine_late:+.0%}, "
            text += f"steps {machine.engine_excess:+.0%} on the simulated forward"
        if machine.saturated:
            text += "\n      NOT VALID: " + machine.saturated
    if record.error:
        text += "\n      " + record.error.replace("\n", "\n      ")
    return text
