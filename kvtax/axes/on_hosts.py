# SPDX-License-Identifier: Apache-2.0
"""Cells of the observatory on the hosts of a Ray cluster, one at a time on each.

On a host, kvtax.hosts.agent starts `python -m kvtax.axes.on_hosts FOLDER`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvtax.axes.cell import measured
from kvtax.axes.matrix import CellName, Claim
from kvtax.engine import provenance
from kvtax.engine.connector import load_connector
from kvtax.engine.installation import Installation
from kvtax.engine.releases import release as environment_of
from kvtax.hosts.work import Work, finished_tasks
from kvtax.hosts.worker import DoTask, require_packages, serve, undo_ray_environment
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.files import read_document, write_document
from kvtax.records.observatory_cell import CellRecord

MODULE = "kvtax.axes.on_hosts"
PACKAGES = "packages.json"


def measure_on_hosts(
    address: str,
    cells: list[CellName],
    claims: Sequence[Claim],
    installed: dict[str, Installation],
) -> Iterator[CellRecord]:
    """Yield the records of `cells`, as they are done; `installed` by release.

    Raises HostsError.
    """
    packages = {
        release: provenance.collect({}, "", environment)["package_versions"]
        for release, environment in installed.items()
    }
    tasks = {
        ", ".join(f"{connector} {release}" for release, connector in group): group
        for group in compared(cells, claims)
    }
    work = Work(
        MODULE,
        {PACKAGES: msgspec.json.encode(packages)},
        {name: msgspec.json.encode(group) for name, group in tasks.items()},
        alone=True,
    )
    with tempfile.TemporaryDirectory(prefix="kvtax-cells-") as aside:
        for task in finished_tasks(address, work, Path(aside)):
            for file in sorted(task.folder.glob("*.json")):
                cell = read_document(file, CellRecord)
                yield msgspec.structs.replace(cell, host=task.host)


def compared(cells: list[CellName], claims: Sequence[Claim]) -> list[list[CellName]]:
    """Group `cells`: those together that a claim sets beside each other."""
    beside = {
        (claim.release, claim.connector): claim.beside
        for claim in claims
        if claim.beside is not None
    }
    groups: dict[CellName, list[CellName]] = {}
    for release, connector in cells:
        first = beside.get((release, connector), connector)
        groups.setdefault((release, first), []).append((release, connector))
    return list(groups.values())


@contextmanager
def _prepared(folder: Path) -> Iterator[DoTask]:
    """Yield the function that measures the cells of a task."""
    # By release, the first host's.
    packages = msgspec.json.decode((folder / PACKAGES).read_bytes())

    def measure_cells(content: bytes, made: Path) -> None:
        cells = msgspec.json.decode(content, type=list[CellName])
        for number, (release, connector) in enumerate(cells):
            config, installed = load_connector(connector), environment_of(release)
            cell = measured(connector, release, config, installed, "kvtax axes --ray")
            require_packages(cell.provenance["package_versions"], packages[release])
            write_document(made / f"{number}.json", cell)
            print(release, connector, cell.error or "measured", flush=True)

    undo_ray_environment()
    with machine_lock():
        yield measure_cells


if __name__ == "__main__":
    sys.exit(serve(_prepared))
