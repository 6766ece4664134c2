# SPDX-License-Identifier: Apache-2.0
"""How a cost moves along an axis: its slope, whether it grows, and in which order.

Each pass over the levels is a sample of its own. Slope and exponent are means over the
passes with Student's t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lab.stats.estimate import Floats
from lab.stats.interval import Interval
from lab.stats.t_and_f import t_quantile
from observatory.axes import Axis

Order = Literal["constant", "linear", "quadratic", "cannot tell"]
EXPONENTS = np.linspace(0.2, 3.0, 141)
# Where the whole interval of the exponent must lie.
LINEAR, QUADRATIC = (0.6, 1.4), (1.6, 2.5)


@dataclass(frozen=True)
class Growth:
    """`first_us` and `last_us` are the medians over the passes at the ends of the axis.

    `slope` is in us per step and `Axis.per`; `passes` is how many it is known from.
    """

    first_us: float
    last_us: float
    slope: Interval
    order: Order
    passes: int

    def grows(self, axis: Axis) -> bool | None:
        """None where the interval holds the margin."""
        low, high = self.slope.ci95
        if low > axis.margin_us:
            return True
        return False if high < axis.margin_us else None


def growth(axis: Axis, passes: list[list[float]]) -> Growth:
    """Of medians in us, (passes, levels), two passes or more."""
    us = np.array(passes)
    x = np.array(axis.levels) / axis.per
    slope = _mean(np.array([np.polyfit(x, one, 1)[0] for one in us]))
    return Growth(
        first_us=float(np.median(us[:, 0])),
        last_us=float(np.median(us[:, -1])),
        slope=slope,
        order=_order(axis, x, us, slope),
        passes=len(us),
    )


def _order(axis: Axis, x: Floats, us: Floats, slope: Interval) -> Order:
    low, high = slope.ci95
    if high < axis.margin_us:
        return "constant"
    if low <= axis.margin_us:
        return "cannot tell"
    low, high = _mean(np.array([_exponent(x, one) for one in us])).ci95
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


def _mean(values: Floats) -> Interval:
    mean, error = float(values.mean()), float(values.std(ddof=1)) / np.sqrt(len(values))
    half = float(t_quantile(0.975, len(values) - 1)) * error
    return Interval(mean, (mean - half, mean + half))
