# SPDX-License-Identifier: Apache-2.0
"""Growth of a cost along an axis: its slope, whether it grows, and in which order.

Each pass over the levels is a sample of its own. Slope and exponent are medians over
the passes, so that a pass that the machine spoilt does not widen the interval. A cost
that rises and falls again has no slope: levels are compared in pairs, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

import numpy as np

from kvtax.axes.axes import AXES, Axis
from kvtax.records.observatory_cell import CellRecord
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats, t_quantile
from kvtax.stats.least_squares import exponent
from kvtax.stats.quantiles import median_of_passes

Order = Literal["constant", "linear", "quadratic", "cannot tell"]
ORDERS: tuple[Order, ...] = get_args(Order)
UNKNOWN: Order = "cannot tell"
# Where the whole interval of p, of the fit a + b x^p, must lie.
LINEAR, QUADRATIC = (0.6, 1.4), (1.6, 2.4)
# So rarely is any of the pairs of levels said to rise that does not.
CHANCE = 0.05


@dataclass(frozen=True)
class Growth:
    """`level_us` are the medians over the passes, one per level of `levels`.

    `last` is the level's cost at the end, and `slope` in us per step and `Axis.per`.
    `grows` is None if that is not known. `passes` is how many they are known from.
    """

    levels: list[int]
    level_us: list[float]
    last: Estimate
    slope: Estimate
    grows: bool | None
    order: Order
    passes: int


def growth(cell: CellRecord, axis: str, time: str) -> Growth | None:
    """Fit `time` along `axis`; return None if the cell does not have it."""
    passes = cell.means_us.get(axis, {}).get(time)
    if not passes:
        return None
    us = np.array(passes)
    x = np.array(cell.levels[axis]) / AXES[axis].per
    slope = median_of_passes(np.array([np.polyfit(x, one, 1)[0] for one in us]))
    by_slope = _above(slope, AXES[axis].margin_us)
    grows = True if _a_pair_rises(AXES[axis], x, us) else by_slope
    return Growth(
        levels=cell.levels[axis],
        level_us=[float(one) for one in np.median(us, axis=0)],
        last=median_of_passes(us[:, -1]),
        slope=slope,
        grows=grows,
        order=_order(x, us) if by_slope else "constant" if grows is False else UNKNOWN,
        passes=len(us),
    )


def whole(cell: CellRecord) -> str:
    """Name the time that a cell is about: all of its connector, or the scheduler's."""
    own = any(methods(cell, axis) for axis in cell.means_us)
    return "connector_us" if own else "scheduler_us"


def methods(cell: CellRecord, axis: str) -> list[str]:
    """List the times of single methods of the connector: `worker.get_finished_us`."""
    return [time for time in cell.means_us.get(axis, {}) if "." in time]


def steepest(cell: CellRecord, axis: str) -> str | None:
    """Find the method that grows most along `axis`; None if none grows."""
    found = {one: growth(cell, axis, one) for one in methods(cell, axis)}
    rises = {
        one: max(told.level_us) - told.level_us[0]
        for one, told in found.items()
        if told and told.grows
    }
    return max(rises, key=rises.__getitem__, default=None)


def interval(found: Estimate) -> tuple[float, float]:
    """Return the interval of a median, which always has one."""
    if found.ci95 is None:
        raise RuntimeError("an estimate of growth has no interval")
    return found.ci95


def _above(found: Estimate, margin: float) -> bool | None:
    """Return whether an estimate is above a margin; None if its interval holds it."""
    low, high = interval(found)
    if low > margin:
        return True
    return False if high < margin else None


def _a_pair_rises(axis: Axis, x: Floats, us: Floats) -> bool:
    """Return whether a level is certainly above a lower one by the whole axis' margin.

    By Student's t over the passes, all pairs at once (Bonferroni).
    """
    margin_us = axis.margin_us * float(x[-1] - x[0])
    pairs = list(combinations(range(len(x)), 2))
    rises = np.array([us[:, high] - us[:, low] for low, high in pairs])
    passes = len(us)
    reach = t_quantile(1 - CHANCE / len(pairs), passes - 1) / np.sqrt(passes)
    certain = rises.mean(axis=1) - reach * rises.std(axis=1, ddof=1)
    return bool((certain > margin_us).any())


def _order(x: Floats, us: Floats) -> Order:
    """Find the order of what grows by its slope."""
    low, high = interval(median_of_passes(np.array([exponent(x, one) for one in us])))
    if LINEAR[0] <= low and high <= LINEAR[1]:
        return "linear"
    if QUADRATIC[0] <= low and high <= QUADRATIC[1]:
        return "quadratic"
    return UNKNOWN
