# SPDX-License-Identifier: Apache-2.0
"""Does a step's cost grow with |cache|? A verdict that noise cannot easily give.

Of each of METRICS (microbench/analysis/metrics.py) two things are known, both in us per
1,000 blocks and with an interval: the slope while |cache| grows, and the fall when the
prefix cache is reset. A machine that gets slower or faster for seconds tilts the slope.
The fall compares two moments that are a second apart, several times, so it is known
better. A cost that falls when the cache empties came from |cache|.

- grows: one of the two lies above max(margin, what two runs of the same config differ
  by) with its whole interval, and the other agrees: its value is at least half as
  large, and of the fall the whole interval is above 0.
- drifts: the slope is as large, but the whole interval of the fall lies below half of
  it. Something else went up.
- flat: the upper end of the fall's interval lies inside +-margin, so that what the full
  cache costs more than the empty one is excluded to be more (a test of non-inferiority;
  costing less with a fuller cache is no cost); two runs of the same config differ by
  less than the margin; and the upper end of the slope's interval is below
  DRIFT_MARGINS of it.
- inconclusive: anything else, no usable reset included.

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
from microbench.analysis.metrics import MARGIN_US_PER_1K_BLOCKS, PARTS

# A cost that drifts by more than so many margins while the cache grows is not flat.
DRIFT_MARGINS = 3
# Slope and fall agree if the one is at least this share of the other.
AGREEING_SHARE = 0.5
# A line explains the binned medians this well, and both halves rise alike.
LINEAR_R2 = 0.9
LINEAR_HALVES = (0.75, 1 / 0.75)
LINEARITY_BINS = 20


def reset_check(metric: str, one: Measured) -> dict[str, Any] | None:
    """The cost of `metric` before and after a prefix-cache reset; None without any."""
    reset = one.resets[metric]
    if reset is None:
        return None
    return {
        "before_us": round(reset.before_us, 3),
        "after_us": round(reset.after_us, 3),
        "fall_us_per_1k_blocks": stated(one.falls[metric], 3),
    }


def metric_verdict(
    slope: Estimate | None,
    fall: Estimate | None,
    slope_floor: float,
    fall_floor: float,
    margin: float = MARGIN_US_PER_1K_BLOCKS,
) -> str:
    """The verdict on one metric; a floor is by how much the slopes, or falls, of two
    runs of the same thing differ, in us per 1,000 blocks."""
    if slope is None or fall is None:
        return "inconclusive"
    (low, high), (fall_low, fall_high) = slope.ci95, fall.ci95
    rises, falls = low > max(margin, slope_floor), fall_low > max(margin, fall_floor)
    agreeing = AGREEING_SHARE * slope.value
    if falls and slope.value >= AGREEING_SHARE * fall.value:
        return "grows"
    if rises and fall_low > 0 and fall.value >= agreeing:
        return "grows"
    if rises and fall_high < agreeing:
        return "drifts"
    still = max(abs(fall_high), fall_floor) < margin
    return "flat" if still and high < DRIFT_MARGINS * margin else "inconclusive"


def overall_verdict(of: Mapping[str, str]) -> str:
    """The config's verdict from those on each of METRICS that was measured."""
    parts = [name for name in of if name in PARTS] or ["schedule", "overhead"]
    if "grows" in (of[name] for name in (*parts, "schedule", "overhead")):
        return "grows"
    if "drifts" in (of[name] for name in parts):
        return "drifts"
    flat = all(of[name] == "flat" for name in parts)
    vetoed = "grows" in (of["step"], of.get("step_cpu"))
    return "flat" if flat and not vetoed else "inconclusive"


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
