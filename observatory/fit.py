# SPDX-License-Identifier: Apache-2.0
"""How a cost moves along an axis: its slope, whether it grows, and in which order.

Each pass over the levels is a sample of its own. Slope and exponent are medians over
the passes. The 95 % interval of a median lies between two of the samples (a sign test:
of 9, the second and the eighth), so a pass that the machine spoilt does not widen it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lab.records.observatory_cell import CellRecord
from lab.stats.estimate import Floats
from lab.stats.interval import Interval
from observatory.axes import AXES, Axis

Order = Literal["constant", "linear", "quadratic", "cannot tell"]
ORDERS: tuple[Order, ...] = get_args(Order)
TAIL = 0.025
# The exponents p of a + b x^p that are tried, and where the whole interval must lie.
EXPONENTS = np.linspace(0.2, 3.0, 141)
LINEAR, QUADRATIC = (0.6, 1.4), (1.6, 2.4)


@dataclass(frozen=True)
class Growth:
    """`level_us` are the medians over the passes, one per level of `levels`.

    `last` is the level's cost at the end, and `slope` in us per step and `Axis.per`.
    `passes` is how many they are known from.
    """

    levels: list[int]
    level_us: list[float]
    last: Interval
    slope: Interval
    order: Order
    passes: int


def growth(cell: CellRecord, axis: str, time: str) -> Growth | None:
    """How `time` moves along `axis`; None if it was not taken."""
    passes = cell.means_us.get(axis, {}).get(time)
    if not passes:
        return None
    us = np.array(passes)
    x = np.array(cell.levels[axis]) / AXES[axis].per
    slope = _median(np.array([np.polyfit(x, one, 1)[0] for one in us]))
    return Growth(
        levels=cell.levels[axis],
        level_us=[float(one) for one in np.median(us, axis=0)],
        last=_median(us[:, -1]),
        slope=slope,
        order=_order(AXES[axis], x, us, slope),
        passes=len(us),
    )


def whole(cell: CellRecord) -> str:
    """The time that a cell is about: all of its connector, or the scheduler's."""
    own = any(methods(cell, axis) for axis in cell.means_us)
    return "connector_us" if own else "scheduler_us"


def methods(cell: CellRecord, axis: str) -> list[str]:
    """The times that are of one method of the connector: `worker.get_finished_us`."""
    return [time for time in cell.means_us.get(axis, {}) if "." in time]


def steepest(cell: CellRecord, axis: str) -> str | None:
    """The method that grows most along `axis`; None if none grows."""
    found = {one: growth(cell, axis, one) for one in methods(cell, axis)}
    rises = {
        one: told.slope.value
        for one, told in found.items()
        if told and grows(AXES[axis], told.slope)
    }
    return max(rises, key=rises.__getitem__, default=None)


def grows(axis: Axis, slope: Interval) -> bool | None:
    """None where the interval holds the margin."""
    low, high = slope.ci95
    if low > axis.margin_us:
        return True
    return False if high < axis.margin_us else None


def _order(axis: Axis, x: Floats, us: Floats, slope: Interval) -> Order:
    growing = grows(axis, slope)
    if not growing:
        return "constant" if growing is False else "cannot tell"
    low, high = _median(np.array([_exponent(x, one) for one in us])).ci95
    if LINEAR[0] <= low and high <= LINEAR[1]:
        return "linear"
    if QUADRATIC[0] <= low and high <= QUADRATIC[1]:
        return "quadratic"
    return "cannot tell"


def _exponent(x: Floats, us: Floats) -> float:
    """p of the curve a + b x^p through one pass with the least squares."""
    powers = (x / x.max()) ** EXPONENTS[:, None]
    run = powers - powers.mean(axis=1, keepdims=True)
    rise = us - us.mean()
    slope = (run @ rise) / (run**2).sum(axis=1)
    left = ((rise - slope[:, None] * run) ** 2).sum(axis=1)
    return float(EXPONENTS[np.argmin(left)])


def _median(values: Floats) -> Interval:
    ordered = np.sort(values)
    outside = _ranks_outside(len(ordered))
    ends = float(ordered[outside]), float(ordered[-1 - outside])
    return Interval(float(np.median(ordered)), ends)


def _ranks_outside(samples: int) -> int:
    """How many samples at each end are not in the interval; 0 if there are too few."""
    outside, chance = 0, 0.0
    while True:
        # That so many of the samples, or fewer, are above the true median.
        chance += math.comb(samples, outside) / 2**samples
        if chance > TAIL:
            return max(outside - 1, 0)
        outside += 1
