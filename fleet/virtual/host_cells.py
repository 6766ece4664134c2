# SPDX-License-Identifier: Apache-2.0
"""What the host takes per step in an engine alone on its core: the observatory's cells.

Along each axis of a cell, a line through the medians of its passes. The forward of
these engines is empty, so a whole step is the host's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.records import RecordsError
from lab.records.documents import read_document
from lab.records.host_times import StepTime, StepTimes
from lab.records.observatory_cell import CellRecord

# On the axis `context` so many requests decode, and its levels are tokens of each. On
# `running` each request has so many tokens.
LONG_BATCH = 4
HELD_TOKENS = 64
BLOCK_TOKENS = 16


def step_times(folder: Path) -> dict[str, StepTimes]:
    """By connector, of the measured cells in `folder`. Raises RecordsError."""
    cells = [read_document(path, CellRecord) for path in sorted(folder.glob("*.json"))]
    found = {cell.connector: _of(cell) for cell in cells if cell.error is None}
    if not found:
        raise RecordsError(f"{folder}: no cell of the observatory in it")
    return found


def _of(cell: CellRecord) -> StepTimes:
    levels: dict[str, dict[str, np.ndarray]] = {"scheduler": {}, "worker": {}}
    for axis, means_us in cell.means_us.items():
        scheduler = np.median(means_us["scheduler_us"], axis=0)
        levels["scheduler"][axis] = scheduler
        levels["worker"][axis] = np.median(means_us["step_us"], axis=0) - scheduler
    return StepTimes(**{part: _time(cell, us) for part, us in levels.items()})


def _time(cell: CellRecord, us: dict[str, np.ndarray]) -> StepTime:
    """Slopes that fall are noise, and count as none."""

    def along(axis: str) -> tuple[float, float]:
        """(us per unit of the axis, us at its 0)."""
        slope, level = np.polyfit(cell.levels[axis], us[axis], 1)
        return float(slope), float(level)

    per_block = max(0.0, along("cache")[0])
    per_request, base = along("running")
    # More requests and longer ones cache more blocks, which have their own slope.
    per_request -= per_block * HELD_TOKENS / BLOCK_TOKENS
    per_token = along("context")[0] / LONG_BATCH - per_block / BLOCK_TOKENS
    return StepTime(
        base_us=_rounded(base),
        us_per_request=_rounded(per_request),
        us_per_new_request=_rounded(along("arrivals")[0]),
        us_per_1k_context_tokens=_rounded(1e3 * per_token),
        us_per_1k_cached_blocks=_rounded(1e3 * per_block),
    )


def _rounded(us: float) -> float:
    return round(max(0.0, us), 3)
