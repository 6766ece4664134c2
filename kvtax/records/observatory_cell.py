# SPDX-License-Identifier: Apache-2.0
"""Cost of one connector per step on one release of vLLM, along each axis."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import msgspec

from kvtax.records import RecordsError
from kvtax.records.files import decode, write_whole

# By axis and time, for each pass over the axis, a mean in us for each level.
Passes = dict[str, dict[str, list[list[float]]]]


class AxisHolds(msgspec.Struct, kw_only=True):
    """Holds of one axis; lists have a list for each pass, with a value for each level.

    Levels come in a random order in each pass.
    """

    steps: int
    """Steps of a hold."""
    time_s: list[list[float]] = []
    """When it was, since the engine started."""
    age_s: list[list[float]] = []
    """When it was, since the prefix cache was reset."""
    slow: list[list[int]] = []
    """Steps in which the connector took over 1 ms more than in half of the others."""


class Idle(msgspec.Struct, frozen=True):
    """Rates of an engine that has no request, per second."""

    steps_per_s: float
    """Steps that the connector asks for."""
    cpu_ms_per_s: float
    """CPU time of those steps, of other threads and of the connector's processes."""


class CellRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.observatory_cell/1"
):
    """One cell of the observatory: a line of `RELEASE.jsonl.xz`."""

    release: str
    """Of vLLM."""
    connector: str
    """A config in `configs/connectors/`, or the name of a user's own connector."""
    provenance: dict[str, Any]
    """As `provenance` in `run.json`."""
    host: str | None = None
    """The address of the host of several that measured it; null without `--ray`."""
    wall_s: float
    """What the cell took, its start included."""
    levels: dict[str, list[int]] = {}
    """By axis, where it was measured."""
    means_us: Passes = {}
    """By axis and time, for each pass over the levels, the mean of a step in us at each
    level. The slowest tenth of the steps is left out. `threads_us` and `processes_us`
    are CPU time: of the engine's other threads, and of what the connector started."""
    noop_us: Passes = {}
    """The same of a no-op connector's engine beside it: both are held at each level of
    an axis, one after the other. Empty if the connector was measured alone."""
    holds: dict[str, AxisHolds] = {}
    """By axis, when its levels were held; empty in older cells."""
    idle: Idle | None = None
    """Without requests, after the last hold; null in older cells."""
    error: str | None = None
    """Why it could not be measured."""


def read_cells(file: Path) -> list[CellRecord]:
    """Read the cells of one release. Raises RecordsError."""
    return [decode(file, line, CellRecord) for line in _lines(file)]


def keep_cell(cell: CellRecord, folder: Path) -> None:
    """Put `cell` into its release's file, in place of an older one of its connector.

    A killed writer leaves the old file. Raises RecordsError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{cell.release}.jsonl.xz"
    lines = {
        decode(file, line, CellRecord).connector: line
        for line in (_lines(file) if file.exists() else [])
    }
    lines[cell.connector] = msgspec.json.encode(cell) + b"\n"
    content = b"".join(line for _, line in sorted(lines.items()))
    write_whole(file, lzma.compress(content, preset=9))


def _lines(file: Path) -> list[bytes]:
    try:
        return lzma.decompress(file.read_bytes()).splitlines(keepends=True)
    except (lzma.LZMAError, OSError) as error:
        raise RecordsError(f"{file}: {error}") from None
