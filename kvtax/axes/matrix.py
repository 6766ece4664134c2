# SPDX-License-Identifier: Apache-2.0
"""Connectors and releases of the observatory; measure and keep each cell."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtax.axes.cell import measured
from kvtax.config import read_toml
from kvtax.engine import provenance
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.installation import Installation
from kvtax.engine.releases import (
    known_releases,
    on_sources,
    source_version,
    tested_releases,
)
from kvtax.engine.releases import release as environment_of
from kvtax.hosts import Cluster, Task, finished_tasks, require_same
from kvtax.paths import CONFIGS, REPOSITORY
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.estimate import Estimate
from kvtax.records.files import decode, write_document
from kvtax.records.observatory_cell import CellRecord, keep_cell, read_cells

# (release, connector) of a cell.
CellName = tuple[str, str]


class Growing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a connector that grows, and the code `where` it does.

    Measured along `axis` in the cell of `config` on `release`; or with work pending, in
    the row of `what` and `level`; else only read in the source.
    """

    connector: str
    grows_with: str
    where: str
    fix: str
    reported: str
    release: str
    config: str | None = None
    axis: str | None = None
    time: str = "connector_us"
    what: str | None = None
    level: str | None = None


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each of `connectors` on each of `releases` (by default, the known ones).

    `stand_ins` describes, by patch, the part that a connector is measured without.
    `reasons` states, by name in vLLM's factory, why a connector has no cell. Each cell
    is measured beside `noop`.
    """

    connectors: list[str]
    noop: str
    releases: list[str] = []
    stand_ins: dict[str, str] = {}
    reasons: dict[str, str] = {}
    growing: list[Growing] = []

    def stand_in_of(self, connector: str) -> str | None:
        """Return the connector's patch that replaces a part of the real thing."""
        patches = load_connector(connector).patches
        return next((patch for patch in patches if patch in self.stand_ins), None)


def read_matrix() -> Matrix:
    """Read configs/observatory.toml. Raises ConfigError."""
    matrix = read_toml(CONFIGS / "observatory.toml", Matrix)
    return msgspec.structs.replace(matrix, releases=known_releases())


RESULTS = REPOSITORY / "studies" / "observatory"
PENDING = RESULTS / "pending.json.gz"
COMMAND = "kvtax"


@dataclass(frozen=True)
class Choice:
    """Cells to measure and `folder` to keep them in; `again` those that are kept.

    Of some releases and connectors, or of all that can be installed; or of the vLLM
    whose Python files are in `vllm`, on the compiled parts of the newest release with a
    CPU build.
    """

    releases: list[str] | None = None
    connectors: list[str] | None = None
    again: bool = False
    vllm: Path | None = None
    folder: Path = RESULTS

    def names(self) -> list[str]:
        """List the releases. Raises InstallationError if `vllm` has no vLLM."""
        if self.vllm is not None:
            return [source_version(self.vllm)]
        return self.releases or tested_releases()

    @contextmanager
    def installed(self, releases: Iterable[str]) -> Iterator[dict[str, Installation]]:
        """Install what cells of `releases` are measured on, by release.

        Raises InstallationError, ServerError.
        """
        if self.vllm is None:
            yield {release: environment_of(release) for release in releases}
            return
        compiled = environment_of(tested_releases()[-1])
        with tempfile.TemporaryDirectory(prefix="kvtax-sources-") as folder:
            installed = on_sources(self.vllm, compiled, Path(folder))
            yield dict.fromkeys(releases, installed)


def measure_matrix(matrix: Matrix, choice: Choice, ray: Cluster | None) -> None:
    """Measure and keep the cells of `choice`, here or on the Ray cluster `ray`.

    Raises ConfigError, HostsError, MachineBusy, RecordsError, ServerError, OSError.
    """
    kept = read_all_cells(choice.folder)
    cells = [
        (release, connector)
        for release in choice.names()
        for connector in choice.connectors or matrix.connectors
        if choice.again or (release, connector) not in kept
    ]
    # All at once, so that a missing one is reported before an hour of measuring.
    configs = {connector: load_connector(connector) for _, connector in cells}
    with choice.installed({release for release, _ in cells}) as installed:
        if ray is None:
            records = _measure_here(matrix, cells, configs, installed)
        else:
            records = _measure_on_hosts(ray, cells, installed)
        for number, cell in enumerate(records, 1):
            print(f"kvtax axes: {number} of {len(cells)}: {_line(cell)}", flush=True)
            keep_cell(cell, choice.folder)


def read_all_cells(folder: Path = RESULTS) -> dict[CellName, CellRecord]:
    """Read the kept cells of all releases. Raises RecordsError."""
    return {
        (cell.release, cell.connector): cell
        for file in sorted(folder.glob("*.jsonl.xz"))
        for cell in read_cells(file)
    }


class PendingRow(msgspec.Struct, frozen=True):
    """Time that a connector's list of pending work takes at one length."""

    part: str
    what: str
    level: str
    time: Estimate
    unit: str


class PendingResult(msgspec.Struct, frozen=True):
    """Rows of PENDING, and the commit and command that measured them."""

    provenance: dict[str, Any]
    rows: list[PendingRow]


def read_pending() -> PendingResult:
    """Read PENDING, whose code is gone: its rows stay as data. Raises OSError."""
    return msgspec.json.decode(
        gzip.decompress(PENDING.read_bytes()), type=PendingResult
    )


class SourcesRow(msgspec.Struct, frozen=True):
    """Whole steps of a connector along an axis: a build, and its sources beside it.

    Ratios are means over the levels; us are the connector's at the last level.
    """

    connector: str
    axis: str
    build_us: float
    sources_us: float
    sources_by_build: Estimate
    build_by_build: Estimate


class SourcesResult(msgspec.Struct, frozen=True):
    """Committed result of studies.observatory: sources of `release` and its build.

    The sources ran on the compiled parts of `compiled`.
    """

    release: str
    compiled: str
    rows: list[SourcesRow]


def read_sources() -> SourcesResult | None:
    """Read what studies.observatory measured; None where it is not committed."""
    file = RESULTS / "result.json.gz"
    if not file.exists():
        return None
    return msgspec.json.decode(gzip.decompress(file.read_bytes()), type=SourcesResult)


def _measure_here(
    matrix: Matrix,
    cells: list[CellName],
    configs: dict[str, Connector],
    installed: dict[str, Installation],
) -> Iterator[CellRecord]:
    """Yield each cell as soon as it is measured, so that a stopped run keeps it."""
    noop = load_connector(matrix.noop)
    with machine_lock():
        for release, name in cells:
            print(f"kvtax axes: measuring {name} on vLLM {release}", flush=True)
            there = installed[release]
            yield measured(name, release, configs[name], there, COMMAND, noop)


def _measure_on_hosts(
    cluster: Cluster, cells: list[CellName], installed: dict[str, Installation]
) -> Iterator[CellRecord]:
    """Yield the records of `cells`, as they are done; `installed` by release."""
    versions = {release: there.versions for release, there in installed.items()}
    tasks = [
        Task(
            f"{connector} {release}",
            _measure_there,
            (release, connector, versions[release]),
        )
        for release, connector in cells
    ]
    for task in finished_tasks(cluster, tasks, measures=True):
        for name, content in sorted(task.files.items()):
            cell = decode(Path(name), content, CellRecord)
            facts = cell.provenance | provenance.checkout()
            yield msgspec.structs.replace(cell, host=task.host, provenance=facts)


def _measure_there(
    folder: Path, release: str, connector: str, versions: dict[str, str]
) -> None:
    """Measure a cell into `folder`, on a host of a cluster."""
    noop, command = load_connector(read_matrix().noop), f"{COMMAND} --ray"
    config, installed = load_connector(connector), environment_of(release)
    require_same(installed, versions)
    cell = measured(connector, release, config, installed, command, noop)
    write_document(folder / "cell.json", cell)


def _line(cell: CellRecord) -> str:
    where = f" on {cell.host}" if cell.host else ""
    outcome = cell.error or "measured"
    return (
        f"vLLM {cell.release}, {cell.connector}{where}: {outcome}, {cell.wall_s:.0f} s"
    )
