# SPDX-License-Identifier: Apache-2.0
"""How each metric of a config moves with |cache|, server process by server process.

The slope in the growth phase, and the fall at the prefix-cache reset: what the full
cache costs more than the nearly empty one after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lab.records.phases import Phase
from lab.stats.mean_slope import mean_slopes
from lab.stats.processes import Repeats
from lab.stats.slope import Cells, slopes_of_repeats
from microbench.analysis.levels import common_mix, reach_blocks
from microbench.analysis.metrics import METRICS, Metric
from microbench.analysis.middle import LEAST_SCALE_US, by_repeat, repeats_of

# The steps compared: |cache| above 90 % of the reach before, below 25 % of it after.
BEFORE_SHARE = 0.9
AFTER_SHARE = 0.25
MIN_STEPS_PER_BATCH = 10


def steps_of(steps: pl.DataFrame, metric: Metric) -> pl.DataFrame:
    """The steps that `metric` is about, in which its time was measured."""
    kept = steps.filter(pl.col(metric.time).is_not_null())
    return kept if metric.steps == "all" else kept.filter(metric.steps)


def slope_by_repeat(
    growth: pl.DataFrame, cells: Cells, metric: Metric, seed: int
) -> Repeats | None:
    """us per 1,000 cached blocks in each repeat, as a share of the metric's level.

    `growth` are the steps of the growth phase; `cells` are the medians of its
    decode-only steps. None where no repeat gives a slope.
    """
    steps = steps_of(growth, metric)
    if metric.middle == "median":
        found = slopes_of_repeats(cells, metric.time, seed)
        scale = steps[metric.time].median()
    else:
        found = mean_slopes(steps, metric.time, block_steps=metric.block_steps)
        scale = steps[metric.time].mean()
    return found and Repeats(*found, max(abs(scale), LEAST_SCALE_US))


@dataclass(frozen=True)
class Fall:
    """A metric at full cache and just after the reset, in us, and its fall."""

    before_us: float
    after_us: float
    drop_us: Repeats


class Reset:
    """The steps on both sides of the prefix-cache reset, of all of a config's."""

    def __init__(self, steps: pl.DataFrame) -> None:
        reach = reach_blocks(steps)
        blocks, phase = pl.col("cache_blocks"), pl.col("phase")
        high, low = blocks >= BEFORE_SHARE * reach, blocks <= AFTER_SHARE * reach
        self.before = steps.filter(phase < Phase.AFTER_RESET, high)
        self.after = steps.filter(phase == Phase.AFTER_RESET, low)
        sides = (self.before, self.after)
        batches = [side.filter("decode_only")["batch"].to_numpy() for side in sides]
        self.mix = common_mix(batches, MIN_STEPS_PER_BATCH) if reach else {}

    def fall(self, metric: Metric, seed: int) -> Fall | None:
        """What became of `metric`; None without comparable steps on both sides."""
        before, after = (
            by_repeat(steps_of(side, metric), metric.time, metric.middle, self.mix, s)
            for side, s in ((self.before, seed), (self.after, seed + 100))
        )
        drops = {
            repeat: (high - after[repeat][0], variance + after[repeat][1])
            for repeat, (high, variance) in before.items()
            if repeat in after
        }
        if not drops:
            return None
        high_us, low_us = (
            float(np.mean([side[repeat][0] for repeat in drops]))
            for side in (before, after)
        )
        return Fall(high_us, low_us, repeats_of(drops, high_us))

    def facts(self) -> dict[str, int]:
        """What is compared; nothing where there are no such steps."""
        if not self.mix:
            return {}
        sides = {"before": self.before, "after": self.after}
        told = {}
        for name, side in sides.items():
            held = side.filter("decode_only", pl.col("batch").is_in(list(self.mix)))
            told[f"cache_blocks_{name}"] = round(held["cache_blocks"].median())
            told[f"steps_{name}"] = held.height
        return told


def falls(reset: Reset, seed: int) -> dict[str, Fall | None]:
    """By metric."""
    return {name: reset.fall(metric, seed) for name, metric in METRICS.items()}
