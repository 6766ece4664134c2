# SPDX-License-Identifier: Apache-2.0
"""The runs of an experiment in virtual time, on the hosts of a Ray cluster."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.experiment.arm import TRACE, ExperimentContext
from fleet.experiment.host import EXPERIMENT, Task
from fleet.experiment.plan import Run
from lab.hosts.cluster import spread
from lab.hosts.unpack import unpack
from lab.records.arm import PlannedArm

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
    done_by: dict[str, int] = {}
    for number, host, packed in spread(address, MODULE, files, tasks):
        run, _ = runs[number]
        made = unpack(packed, context.workshop.folder)
        yield _moved(made, out / run.folder)
        done_by[host] = done_by.get(host, 0) + 1
    for host, count in sorted(done_by.items()):
        print(f"{host}: {count} runs", file=sys.stderr)


def _moved(made: Path, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return made.rename(folder)
