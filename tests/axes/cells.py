# SPDX-License-Identifier: Apache-2.0
"""Cells whose costs are made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtax.records.observatory_cell import AxisHolds, CellRecord
from kvtax.verdict.axes import AXES

PASSES = 9
META = "scheduler.build_connector_meta_us"
PROVENANCE = {
    "git_commit": "0123456789abcdef",
    "date_utc": "2026-11-22T10:00:00+00:00",
    "patch_hashes": {},
}

Cost = Callable[[float], float]


def slow_at(*levels: int, axis: str = "cache") -> AxisHolds:
    """Holds of `axis` with one slow step at each of these levels, in each pass."""
    slow = [int(level in levels) for level in AXES[axis].levels]
    return AxisHolds(steps=150, slow=[list(slow) for _ in range(PASSES)])


def made(
    connector: str = "mine", release: str = "0.32.0", noise: float = 0.02, **costs: Cost
) -> CellRecord:
    """A cell in which build_connector_meta costs `costs[axis](level)` us, else 10."""
    random = np.random.default_rng(1)

    def passes(axis: str) -> list[list[float]]:
        cost = costs.get(axis, lambda level: 10.0)
        real = np.array([cost(level) for level in AXES[axis].levels])
        scale = 1 + noise * random.standard_normal((PASSES, len(real)))
        return (real * scale).tolist()

    return CellRecord(
        release=release,
        connector=connector,
        provenance=dict(PROVENANCE),
        wall_s=24.0,
        levels={axis: list(told.levels) for axis, told in AXES.items()},
        means_us={
            axis: {"connector_us": us, META: us}
            for axis in AXES
            for us in [passes(axis)]
        },
    )
