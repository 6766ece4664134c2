# SPDX-License-Identifier: Apache-2.0
"""How each metric of a config moves with |cache|, server process by server process.

The slope in the growth phase, and the fall at the prefix-cache reset: what the full
cache costs more than the nearly empty one after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from lab.stats.mean_slope import mean_slopes
from lab.stats.processes import Repeats
from lab.stats.slope import Cells, slopes_of_repeats
from microbench.analysis.levels import common_mix, reach_blocks
from microbench.analysis.metrics import METRICS, Metric
from microbench.analysis.middle import LEAST_SCALE_US, by_repeat, repeats_of

# The steps compared: |cache| above 90 % of the reach before, below 25 % of it after.
BEFORE_SHARE = 0.9
AFTER_SHARE = 0.25
# Kinds of steps that one of the sides hardly has are not compared.
MIN_STEPS_PER_GROUP = 5


def steps_of(steps: pl.DataFrame, metric: Metric) -> pl.DataFrame:
    """The steps that `metric` is about, in which its time was measured."""
    kept = steps.filter(pl.col(metric.time).is_not_null())
    if metric.slowness_share:
        slowness = pl.col("slowness") ** metric.slowness_share
        kept = kept.with_columns(pl.col(metric.time) / slowness)
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
        grouped = steps.with_columns(metric.group)
        # What drifts from one growth to the next is not due to |cache|.
        held = ("cycle",) if metric.beside else ("cycle", "group")
        found = mean_slopes(
            grouped, metric.time, held, metric.block_steps, metric.beside
        )
        scale = steps[metric.time].mean()
    return found and Repeats(*found, max(abs(scale), LEAST_SCALE_US))


@dataclass(frozen=True)
class Fall:
    """A metric at full cache and just after a reset, in us, on average over the resets.

    `per_1k_blocks` is what it falls by, in us per 1,000 blocks, in each repeat.
    """

    before_us: float
    after_us: float
    per_1k_blocks: Repeats


class Reset:
    """The steps on both sides of each prefix-cache reset, of all of a config's.

    A step belongs to the reset of its `pair`: the one after its cycle if it is before
    it, the one that its cycle began with if it is after it.
    """

    def __init__(self, steps: pl.DataFrame) -> None:
        reach = reach_blocks(steps)
        blocks, cycle = pl.col("cache_blocks"), pl.col("cycle").cast(pl.Int64)
        high = steps.filter(blocks >= BEFORE_SHARE * reach, blocks > 0)
        low = steps.filter(blocks <= AFTER_SHARE * reach, cycle > 0)
        self.before = high.with_columns((cycle + 1).alias("pair"))
        self.after = low.with_columns(cycle.alias("pair"))
        self._mixes: dict[str, dict[int, float]] = {}

    def _mix(self, metric: Metric) -> dict[int, float]:
        """The share of each kind of steps that both sides have."""
        key = f"{metric.time} {metric.steps}"
        if key not in self._mixes:
            groups = [
                steps_of(side, metric).select(metric.group).to_series().to_numpy()
                for side in (self.before, self.after)
            ]
            self._mixes[key] = common_mix(groups, MIN_STEPS_PER_GROUP)
        return self._mixes[key]

    def fall(self, metric: Metric, seed: int) -> Fall | None:
        """What became of `metric`; None without comparable steps on both sides."""
        pairs = [
            self._of_pair(pair, metric, seed)
            for pair in self.after["pair"].unique().sort().to_list()
        ]
        before, after, drops = {}, {}, {}
        for high, low, blocks_1k in pairs:
            for repeat in high.keys() & low.keys():
                (full_us, error), (empty_us, other) = high[repeat], low[repeat]
                before.setdefault(repeat, []).append(full_us)
                after.setdefault(repeat, []).append(empty_us)
                drop = (full_us - empty_us) / blocks_1k
                found = drops.setdefault(repeat, [])
                found.append((drop, (error + other) / blocks_1k**2))
        if not drops:
            return None
        high_us, low_us = (
            float(np.mean([np.mean(us) for us in side.values()]))
            for side in (before, after)
        )
        means = {
            repeat: (
                float(np.mean([drop for drop, _ in found])),
                float(np.mean([variance for _, variance in found])) / len(found),
            )
            for repeat, found in sorted(drops.items())
        }
        return Fall(high_us, low_us, repeats_of(means, high_us))

    def _of_pair(
        self, pair: int, metric: Metric, seed: int
    ) -> tuple[dict[int, tuple[float, float]], dict[int, tuple[float, float]], float]:
        """`metric` before and after one reset by repeat, and how far |cache| fell."""
        own = [
            side.filter(pl.col("pair") == pair) for side in (self.before, self.after)
        ]
        seeds = (seed + 10 * pair, seed + 10 * pair + 5)
        mix = self._mix(metric)
        high, low = (
            by_repeat(steps_of(side, metric), metric, mix, s)
            for side, s in zip(own, seeds, strict=True)
        )
        full, empty = (side["cache_blocks"].mean() or 0.0 for side in own)
        return high, low, max(full - empty, 1.0) / 1_000

    def each_fall(self, metric: Metric, repeats: int) -> list[float]:
        """us per 1,000 blocks, at each reset of the first `repeats` servers."""
        if not (mix := self._mix(metric)):
            return []
        weight = pl.col("group").replace_strict(mix, return_dtype=pl.Float64)
        means = [
            steps_of(side, metric)
            .with_columns(metric.group)
            .filter(pl.col(metric.time).is_finite(), pl.col("group").is_in(list(mix)))
            .group_by("repeat", "pair", "group")
            .agg(pl.col(metric.time, "cache_blocks").mean(), weight.first().alias("w"))
            .group_by("repeat", "pair")
            .agg(
                (pl.col(metric.time, "cache_blocks") * pl.col("w")).sum()
                / pl.col("w").sum()
            )
            for side in (self.before, self.after)
        ]
        both = means[0].join(means[1], on=("repeat", "pair"), suffix="_after")
        both = both.filter(pl.col("repeat") < repeats).sort("repeat", "pair")
        fell_us = pl.col(metric.time) - pl.col(f"{metric.time}_after")
        fell_blocks = pl.col("cache_blocks") - pl.col("cache_blocks_after")
        return both.select(1_000 * fell_us / fell_blocks).to_series().to_list()

    def facts(self) -> dict[str, int]:
        """What is compared; nothing where there are no such steps."""
        mix = self._mix(METRICS["step"])
        if not mix:
            return {}
        sides = {"before": self.before, "after": self.after}
        told = {"resets": self.after["pair"].n_unique()}
        for name, side in sides.items():
            held = side.filter("decode_only", pl.col("batch").is_in(list(mix)))
            told[f"cache_blocks_{name}"] = round(held["cache_blocks"].median())
            told[f"steps_{name}"] = held.height
        return told


def falls(
    reset: Reset, metrics: Mapping[str, Metric], seed: int
) -> dict[str, Fall | None]:
    """By metric."""
    return {name: reset.fall(metric, seed) for name, metric in metrics.items()}
