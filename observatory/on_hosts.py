# SPDX-License-Identifier: Apache-2.0
"""Cells of the observatory on the hosts of a Ray cluster, one at a time on each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from lab.hosts.apart import spread
from lab.hosts.progress import Progress
from lab.hosts.unpack import unpack
from lab.records.documents import read_document
from lab.records.observatory_cell import CellRecord
from lab.serving import provenance
from lab.serving.installation import Installation
from observatory.host import PACKAGES, Cells
from observatory.matrix import Claim

MODULE = "observatory.host"


def measure_on_hosts(
    address: str,
    cells: Cells,
    claims: Sequence[Claim],
    installed: dict[str, Installation],
) -> Iterator[CellRecord]:
    """The records of `cells`, as they are done; `installed` by release.

    Raises HostsError.
    """
    packages = {
        release: provenance.collect({}, "", one)["package_versions"]
        for release, one in installed.items()
    }
    files = {PACKAGES: msgspec.json.encode(packages)}
    together = compared(cells, claims)
    tasks = [msgspec.json.encode(some) for some in together]
    with (
        tempfile.TemporaryDirectory(prefix="kvtax-cells-") as aside,
        Progress([_name(some) for some in together]) as progress,
    ):
        done = spread(address, MODULE, files, tasks, alone=True, progress=progress)
        for _, host, packed in done:
            for file in sorted(unpack(packed, Path(aside)).glob("*.json")):
                cell = read_document(file, CellRecord)
                yield msgspec.structs.replace(cell, host=host)


def compared(cells: Cells, claims: Sequence[Claim]) -> list[Cells]:
    """`cells`, those together that one of `claims` sets beside each other."""
    beside = {
        (claim.release, claim.connector): claim.beside
        for claim in claims
        if claim.beside is not None
    }
    found: dict[tuple[str, str], Cells] = {}
    for release, connector in cells:
        first = beside.get((release, connector), connector)
        found.setdefault((release, first), []).append((release, connector))
    return list(found.values())


def _name(cells: Cells) -> str:
    return ", ".join(f"{connector} {release}" for release, connector in cells)
