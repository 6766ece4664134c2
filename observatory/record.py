# SPDX-License-Identifier: Apache-2.0
"""What is kept of a cell: docs/results/observatory/RELEASE/CONNECTOR.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.paths import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results" / "observatory"


class CellRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.observatory_cell/1"
):
    """One connector on one release."""

    release: str
    """Of vLLM."""
    connector: str
    """A config in configs/connectors/."""
    provenance: dict[str, Any]
    """Where and with what it was measured."""
    wall_s: float
    """What the cell took, its start included."""
    levels: dict[str, list[int]] = {}
    """By axis, where it was measured."""
    medians_us: dict[str, dict[str, list[list[float]]]] = {}
    """By axis and time, for each pass, the medians per step at the levels, in us."""
    error: str | None = None
    """Why it could not be measured: the end of the engine's log."""


def place(release: str, connector: str) -> Path:
    """Where the cell's record is kept."""
    return RESULTS / release / f"{connector.replace('/', '.')}.json"
