# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment in virtual time, on the hosts of a Ray cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.experiment.arm import TRACE, ExperimentContext
from fleet.experiment.host import EXPERIMENT, Task
from fleet.experiment.outcome import finished
from fleet.experiment.plan import Run
from lab.hosts.delivered import Work, delivered
from lab.records.arm import PlannedArm
from lab.store.store import Store

MODULE = "fleet.experiment.host"


def simulate_on_hosts(
    address: str,
    store: Store | None,
    context: ExperimentContext,
    runs: list[tuple[Run, PlannedArm]],
    out: Path,
) -> Iterator[Path]:
    """As fleet.experiment.virtual.simulate, on all hosts of the cluster at `address`.

    A run's folder appears whole. Raises HostsError and StoreError.
    """
    files = {
        EXPERIMENT: msgspec.json.encode(context.experiment),
        TRACE: context.trace.read_bytes(),
    }
    tasks = {
        run.folder: msgspec.json.encode(Task(run.folder, planned))
        for run, planned in runs
    }
    work = Work(MODULE, files, tasks)

    def good(name: str, made: Path) -> bool:
        return finished(made)

    for done in delivered(address, work, context.workshop.folder, store, good):
        yield _moved(done.folder, out / done.name)


def _moved(made: Path, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return made.rename(folder)
