# SPDX-License-Identifier: Apache-2.0
"""Does a step's cost grow with |cache|? A verdict that noise cannot easily give.

For each of METRICS (microbench/analysis/metrics.py), with the slope's interval:

- grows: the interval lies above max(MARGIN, what two runs of the same config differ
  by), and the reset check confirms it: after the prefix-cache reset the cost fell by
  at least half of what slope x |cache| predicts, and the interval of the fall lies
  above 0. A cost that falls when the cache empties came from |cache|.
- drifts: the slope is as large, but the whole interval of the fall lies below that
  half. Something else went up.
- flat: the upper end of the interval lies inside +-MARGIN, so growth by more than
  MARGIN is excluded (a test of non-inferiority; the lower end does not matter, as
  costing less with a fuller cache is no cost), and two runs of the same config differ
  by less than MARGIN. An upper end below -MARGIN is not flat: something else must have
  changed.
- inconclusive: anything else, a slope without a usable reset check included.

The config's verdict:

- grows: a part, schedule or overhead grows;
- drifts: a part drifts. In a whole it may be the machine;
- flat: all parts that were measured are flat, and no whole grows. Records from before
  there were parts have schedule and overhead in their place;
- inconclusive: anything else. A step that grows while nothing else does is that, too:
  it also holds the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lab.stats.estimate import Estimate
from lab.stats.interval import stated
from lab.stats.slope import (
    Cells,
    batch_held_us,
    line_fit_r2,
    slope_us_per_1k_blocks,
)
from microbench.analysis.measured import Measured
from microbench.analysis.metrics import PARTS

# us per 1,000 blocks: 35 us at 17,500 blocks, 0.5 % of a 7 ms forward.
MARGIN_US_PER_1K_BLOCKS = 2.0
# Share of the predicted fall that must be seen after the reset.
CONFIRMING_SHARE = 0.5
# A line explains the binned medians this well, and both halves rise alike.
LINEAR_R2 = 0.9
LINEAR_HALVES = (0.75, 1 / 0.75)
LINEARITY_BINS = 20


def reset_check(
    metric: str, one: Measured, blocks_fallen: float
) -> dict[str, Any] | None:
    """The cost of `metric` before and after the prefix-cache reset.

    `blocks_fallen` is how much |cache| fell. None without comparable steps.
    """
    fall, drop, slope = one.falls[metric], one.drops[metric], one.slopes[metric]
    if fall is None or drop is None:
        return None
    expected = 0.0 if slope is None else slope.value * blocks_fallen / 1_000
    low, high = drop.ci95
    confirming = CONFIRMING_SHARE * expected
    return {
        "before_us": round(fall.before_us, 3),
        "after_us": round(fall.after_us, 3),
        "drop_us": round(drop.value, 3),
        "drop_ci95_us": [round(edge, 3) for edge in drop.ci95],
        "expected_drop_us": round(expected, 3),
        "fell": bool(drop.value >= confirming > 0 and low > 0),
        "stayed": bool(high < confirming),
    }


def metric_verdict(
    slope: Estimate | None, check: dict[str, Any] | None, floor: float
) -> str:
    """The verdict on one metric; `check` is its part of the reset check, `floor` by how
    much the slopes of two runs of the same thing differ, in us per 1,000 blocks."""
    if slope is None:
        return "inconclusive"
    low, high = slope.ci95
    if low > max(MARGIN_US_PER_1K_BLOCKS, floor):
        if check and check["fell"]:
            return "grows"
        return "drifts" if check and check["stayed"] else "inconclusive"
    if max(abs(high), floor) < MARGIN_US_PER_1K_BLOCKS:
        return "flat"
    return "inconclusive"


def overall_verdict(of: Mapping[str, str]) -> str:
    """The config's verdict from those on each of METRICS that was measured."""
    parts = [name for name in of if name in PARTS] or ["schedule", "overhead"]
    if "grows" in (of[name] for name in (*parts, "schedule", "overhead")):
        return "grows"
    if "drifts" in (of[name] for name in parts):
        return "drifts"
    flat = all(of[name] == "flat" for name in parts)
    return "flat" if flat and of["step"] != "grows" else "inconclusive"


def linearity(cells: Cells, time: str, slope: Estimate) -> dict[str, Any] | None:
    """Is the growth a straight line in |cache|? None without both halves.

    `linear` is "yes" if the slopes of the lower and the upper half of |cache| differ
    by less than a third and a line explains 90 % of the variance of the medians in 20
    bins (R^2, batch held); "no" if they differ by more and their intervals are apart;
    else "undecided". R^2 alone would take noise for a bend.
    """
    blocks = cells.cache_blocks
    middle = (blocks.min() + blocks.max()) / 2
    lower, upper = (
        slope_us_per_1k_blocks(cells.where(mask), time)
        for mask in (blocks <= middle, blocks > middle)
    )
    if lower is None or upper is None:
        return None
    held = batch_held_us(
        cells.time_us[time], blocks, cells.group, slope.value, cells.steps
    )
    edges = np.linspace(blocks.min(), blocks.max(), LINEARITY_BINS + 1)
    place = np.clip(np.digitize(blocks, edges) - 1, 0, LINEARITY_BINS - 1)
    bins = np.unique(place)
    r2 = line_fit_r2(
        np.array([np.median(blocks[place == b]) for b in bins]),
        np.array([np.median(held[place == b]) for b in bins]),
    )
    ratio = upper.value / lower.value if lower.value > 0 else np.inf
    alike = LINEAR_HALVES[0] <= ratio <= LINEAR_HALVES[1]
    apart = lower.ci95[1] < upper.ci95[0] or upper.ci95[1] < lower.ci95[0]
    linear = "yes" if alike and r2 >= LINEAR_R2 else "undecided"
    return {
        "linear": "no" if apart and not alike else linear,
        "r2": round(r2, 4),
        "slope_lower_half": stated(lower, 3),
        "slope_upper_half": stated(upper, 3),
    }
