# SPDX-License-Identifier: Apache-2.0
"""The record of a cell that came to nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleet.virtual.plan import Cell
from lab.records.arm import ArmRecord
from lab.records.documents import write_document


def failed(cell: Cell, why: str) -> None:
    """Write the arm.json that says so."""
    folder = Path(cell.folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = msgspec.structs.asdict(cell.planned)
    write_document(folder / "arm.json", ArmRecord(**told, status="failed", error=why))
