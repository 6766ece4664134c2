# SPDX-License-Identifier: Apache-2.0
"""Where the cells' records are: docs/results/observatory/RELEASE/CONNECTOR.json."""

from __future__ import annotations

from pathlib import Path

from lab.paths import REPOSITORY
from lab.records.documents import read_document
from lab.records.observatory_cell import CellRecord

RESULTS = REPOSITORY / "docs" / "results" / "observatory"


def place(release: str, connector: str) -> Path:
    """Where the cell's record is kept."""
    return RESULTS / release / f"{connector.replace('/', '.')}.json"


def read_cells(releases: list[str], connectors: list[str]) -> dict:
    """By (release, connector), the cells that were measured. Raises RecordsError."""
    return {
        (release, connector): read_document(file, CellRecord)
        for release in releases
        for connector in connectors
        if (file := place(release, connector)).exists()
    }
