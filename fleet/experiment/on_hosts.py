# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment in virtual time, on the hosts of a Ray cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.experiment.arm import TRACE, ExperimentContext
from fleet.experiment.host import EXPERIMENT, Task
from fleet.experiment.plan import Run
from lab.hosts.apart import spread
from lab.hosts.progress import Progress
from lab.hosts.unpack import unpack
from lab.records.arm import ArmRecord, PlannedArm
from lab.records.documents import read_document

MODULE = "fleet.experiment.host"


def simulate_on_hosts(
    address: str,
    context: ExperimentContext,
    runs: list[tuple[Run, PlannedArm]],
    out: Path,
) -> Iterator[Path]:
    """As fleet.experiment.virtual.simulate, on all hosts of the cluster at `address`.

    A run's folder appears whole. Raises HostsError.
    """
    files = {
        EXPERIMENT: msgspec.json.encode(context.experiment),
        TRACE: context.trace.read_bytes(),
    }
    tasks = [msgspec.json.encode(Task(run.folder, planned)) for run, planned in runs]
    with Progress([run.folder for run, _ in runs]) as progress:
        done = spread(address, MODULE, files, tasks, progress=progress)
        for number, host, packed in done:
            run, _ = runs[number]
            made = _moved(unpack(packed, context.workshop.folder), out / run.folder)
            if read_document(made / "arm.json", ArmRecord).status != "ok":
                progress.failed(host)
            yield made


def _moved(made: Path, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return made.rename(folder)
