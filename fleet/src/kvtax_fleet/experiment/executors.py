# SPDX-License-Identifier: Apache-2.0
"""All runs of an experiment: in real time, in virtual time, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtax import run_folder
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.hosts import Cluster
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document

from kvtax_fleet.experiment import virtual
from kvtax_fleet.experiment.arm_run import make_run
from kvtax_fleet.experiment.config import Experiment, check_arms, read_experiment
from kvtax_fleet.experiment.experiment_plan import (
    PLAN_FILE,
    TRACE,
    ExperimentError,
    PlannedRun,
    prepare,
)
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.records.arm import ArmRecord


@dataclass(frozen=True)
class RunOptions:
    """Options of `kvtax fleet run`."""

    out: Path | None = None
    resume: bool = False
    virtual: bool = False
    ray: Cluster | None = None

    def check(self) -> None:
        """Raise ExperimentError if two options exclude each other."""
        if self.virtual:
            return
        if self.ray is not None:
            raise ExperimentError(
                "--ray is for --virtual: a fleet in real time runs on this machine"
            )


def run_experiment(config: Path, options: RunOptions) -> Path:
    """Make all runs of the experiment that are missing; return the run folder.

    Raises ExperimentError, RunFolderError, ConfigError, TraceError, HostsError and what
    launching raises. `--resume` goes on from there.
    """
    options.check()
    experiment = read_experiment(config)
    out = run_folder.choose(options.out, experiment.name, PLAN_FILE, options.resume)
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(out))
        check_arms(experiment)
        if options.virtual:
            virtual.check_virtual(experiment)
        else:
            _check_real(experiment)
            stack.enter_context(machine_lock())
            settings = experiment.instance_settings
            preflight.check_machine(settings, experiment.instances)
        runs = prepare(experiment, out, options.virtual)
        missing = [run for run in runs if not (options.resume and run.is_finished)]
        workshop = stack.enter_context(Workshop(out / "workshop"))
        made = _make(experiment, missing, out / TRACE, workshop, options)
        for number, run in enumerate(made, len(runs) - len(missing) + 1):
            print(f"{number}/{len(runs)}  {outcome(run.folder)}", flush=True)
    return out


def _make(
    experiment: Experiment,
    runs: list[PlannedRun],
    trace: Path,
    workshop: Workshop,
    options: RunOptions,
) -> Iterator[PlannedRun]:
    """Make the runs; yield each as soon as its folder has the arm.json."""
    if options.ray is not None:
        yield from virtual.make_on_hosts(options.ray, experiment, runs, trace)
    elif options.virtual:
        yield from virtual.make_here(experiment, runs, trace, workshop)
    else:
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
