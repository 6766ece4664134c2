# SPDX-License-Identifier: Apache-2.0
"""One config's steps, and what is estimated from them alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from lab.records.phases import Phase
from lab.stats.estimate import Estimate
from lab.stats.slope import Cells, make_cells, slope_us_per_1k_blocks
from microbench.analysis.levels import Level
from microbench.analysis.speed import at_usual_speed
from microbench.analysis.steps import LoadedTrial
from microbench.analysis.verdict import METRICS


@dataclass
class Measured:
    """The steps of a config's trials that went well, and what follows from them.

    `level` is set once all configs are known: None if this one has no steps at the
    stated |cache|. `medians` are those that p50 was asked for.
    """

    name: str
    steps: pl.DataFrame
    cells: Cells
    slopes: dict[str, Estimate | None]
    seed: int
    level: Level | None = None
    medians: dict[str, Estimate | None] = field(default_factory=dict)

    def p50(self, time: str) -> Estimate | None:
        """The median of `time` at the stated |cache|, with its bootstrap."""
        if self.level is None:
            return None
        # Every comparison asks for it again, and a bootstrap takes its time.
        if time not in self.medians:
            self.medians[time] = self.level.median(time, self.seed + 2)
        return self.medians[time]


def measure(
    name: str, trials: list[LoadedTrial], seed: int, profile: dict[str, Any]
) -> Measured | None:
    """Cells and slopes of the growth phase; None if no trial has steps."""
    tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
    if not tables:
        return None
    steps = pl.concat(tables, rechunk=False)
    growth = steps.filter(pl.col("phase") == Phase.GROWTH)
    if profile.get("null_model"):
        growth = at_usual_speed(growth, float(profile.get("forward_us") or 0))
    times = tuple(METRICS.values())
    cells = make_cells(growth.select("repeat", "batch", "cache_blocks", *times), times)
    slopes = {
        metric: slope_us_per_1k_blocks(cells, time, seed)
        for metric, time in METRICS.items()
    }
    return Measured(name, steps, cells, slopes, seed)
