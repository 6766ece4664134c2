# SPDX-License-Identifier: Apache-2.0
"""Makes the runs in virtual time that its host is asked for.

lab.hosts.agent starts it, as python -m fleet.experiment.host FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from fleet.experiment.arm import TRACE, ExperimentContext
from fleet.experiment.config import Experiment
from fleet.experiment.plan import plan
from fleet.experiment.virtual import WATCH_EVERY_S, Simulation
from fleet.launch.launched import Workshop
from lab.hosts.asked import Asked
from lab.records.arm import PlannedArm
from lab.serving.supervise import exit_on_signals

EXPERIMENT = "experiment.json"


class Task(msgspec.Struct, frozen=True):
    """A run of the experiment: its folder's name, and what its arm.json says of it."""

    run: str
    planned: PlannedArm


def main() -> None:
    folder = Path(sys.argv[1])
    exit_on_signals()
    experiment = msgspec.json.decode(
        (folder / EXPERIMENT).read_bytes(), type=Experiment
    )
    runs = {run.folder: run for run in plan(experiment)}
    asked = Asked(folder)
    numbers: dict[Path, int] = {}
    with Workshop(folder / "workshop") as workshop:
        context = ExperimentContext(experiment, folder / TRACE, workshop)
        with Simulation(context) as simulation:
            while asked.open or simulation.waiting:
                for number, content in asked.come(WATCH_EVERY_S):
                    task = msgspec.json.decode(content, type=Task)
                    into = folder / "runs" / str(number)
                    numbers[into] = number
                    simulation.begin(runs[task.run], task.planned, into)
                for made in simulation.made():
                    asked.done(numbers.pop(made), made)


if __name__ == "__main__":
    main()
