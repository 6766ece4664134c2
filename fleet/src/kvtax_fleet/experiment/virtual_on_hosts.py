# SPDX-License-Identifier: Apache-2.0
"""Runs in virtual time on all hosts of a Ray cluster: the sender, and a host's process.

kvtax.hosts.agent starts the latter as `python -m THIS_MODULE FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from kvtax.hosts.store import Store
from kvtax.hosts.work import Work, finished_tasks
from kvtax.hosts.worker import Tasks
from kvtax.signals import exit_on_signals

from kvtax_fleet.experiment.config import Experiment
from kvtax_fleet.experiment.experiment_plan import TRACE, PlannedRun, is_finished, plan
from kvtax_fleet.experiment.virtual import WATCH_EVERY_S, Simulation
from kvtax_fleet.launch.launched import Workshop
from kvtax_fleet.records.arm import PlannedArm

MODULE = "kvtax_fleet.experiment.virtual_on_hosts"
EXPERIMENT = "experiment.json"


class Task(msgspec.Struct, frozen=True):
    """A run of the experiment: its name, and the fields of its arm.json."""

    run: str
    planned: PlannedArm


class VirtualOnHosts:
    """Makes runs in virtual time, on all hosts of the cluster at `address`.

    A run's folder appears whole. `run` raises HostsError and StoreError.
    """

    def __init__(
        self,
        experiment: Experiment,
        trace: Path,
        aside: Path,
        address: str,
        store: Store | None,
    ) -> None:
        self._files = {
            EXPERIMENT: msgspec.json.encode(experiment),
            TRACE: trace.read_bytes(),
        }
        self._aside = aside
        self._address = address
        self._store = store

    def run(self, runs: Sequence[PlannedRun]) -> Iterator[PlannedRun]:
        """Make the runs; yield each as soon as its folder has the arm.json."""
        by_name = {run.run.name: run for run in runs}
        tasks = {
            name: msgspec.json.encode(Task(name, run.planned))
            for name, run in by_name.items()
        }
        work = Work(MODULE, self._files, tasks)
        for done in finished_tasks(
            self._address,
            work,
            self._aside,
            self._store,
            lambda _, folder: is_finished(folder),
        ):
            run = by_name[done.name]
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(run.folder, ignore_errors=True)
            done.folder.rename(run.folder)
            yield run


def main() -> None:
    """Make the runs that come, until no more can come."""
    folder = Path(sys.argv[1])
    exit_on_signals()
    experiment = msgspec.json.decode(
        (folder / EXPERIMENT).read_bytes(), type=Experiment
    )
    runs = {run.name: run for run in plan(experiment)}
    tasks = Tasks(folder)
    numbers: dict[Path, int] = {}
    with (
        Workshop(folder / "workshop") as workshop,
        Simulation(experiment, folder / TRACE, workshop) as simulation,
    ):
        while tasks.open or simulation.waiting:
            for number, content in tasks.come(WATCH_EVERY_S):
                task = msgspec.json.decode(content, type=Task)
                into = folder / "runs" / str(number)
                numbers[into] = number
                simulation.begin(PlannedRun(runs[task.run], task.planned, into))
            for made in simulation.made():
                tasks.done(numbers.pop(made.folder), made.folder)


if __name__ == "__main__":
    main()
