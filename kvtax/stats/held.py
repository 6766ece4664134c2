# SPDX-License-Identifier: Apache-2.0
"""Levels of a time along an axis that was held at one level after the other.

A hold is one value: the time at one level of one server. The levels come in random
order, and before a lower one the axis is reset. So neither a machine that gets slower
nor a cost that rises with the time since the reset looks like a level; both are fitted
beside the levels.

    value of a hold = level + server + drift of the server * time
                      [+ rise * age] [+ share * control]

A control is how slow the machine was in that hold, by work in which the axis has no
part. Where it rises with the levels after all, for certain, it is left out.

A higher level is older, as a rule: with the age in the fit, levels are known half as
well. So it is in the fit where it matters for certain. Where it may matter, growth must
be certain with it, too.

Noise is a share of the level: a slow machine makes a long time longer by more us than a
short one. Intervals are Student's t from what is left over (analysis of covariance).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from kvtax.stats.distribution import Floats, Ints, f_quantile, t_quantile

Shape = Literal[
    "linear",
    "step",
    "only when full",
    "saturating",
    "curved",
    "not monotone",
]
# A level's error of nothing would be an interval of no width.
LEAST_VARIANCE = 1e-12
# A level weighs as if it were no smaller than this share of the mean level.
LEAST_SHARE = 0.1
# Rounds until the levels' sizes are those that they were weighted by.
ROUNDS = 4
# Ages are told from levels if so much of their variance is not the levels'.
LEAST_OWN_AGE = 0.1
# The age is in the fit if it matters so certainly, a control if it does not move.
CERTAIN = 0.99
# So rarely is a straight line taken for a bend.
BENT = 0.01


@dataclass(frozen=True)
class Holds:
    """Holds of one config, each an element of arrays (holds,).

    `level` counts from 0 up; `x` is what the axis really was. `time_s` is when it was
    held, `age_s` the time since the reset. `control` is what other work took then.
    """

    server: Ints
    level: Ints
    x: Floats
    time_s: Floats
    age_s: Floats
    values: Floats
    control: Floats | None = None


@dataclass(frozen=True)
class Fit:
    """Levels (levels,) of a time in us, `x` of each, and how well they are known.

    `covariance` is that of the levels, `drift_us` by how much the time rises in one
    pass without the axis, `age_us` by how much in the longest time since a reset, None
    where age and level are one; `df` is what the variance of a hold is known from.
    `aged` is the fit with the age in it, None if this is it, or there is none.
    """

    x: Floats
    level_us: Floats
    covariance: Floats
    drift_us: float
    drift_error_us: float
    df: int
    age_us: float | None
    age_error_us: float
    aged: Fit | None = None

    def contrast(self, weights: Floats) -> tuple[float, float]:
        """Return the weighted sum of the levels in us, and its standard error."""
        error = float(np.sqrt(max(float(weights @ self.covariance @ weights), 0.0)))
        return float(weights @ self.level_us), error

    def slope(self) -> tuple[float, float]:
        """Return the slope of a straight line through the levels, and its error."""
        run = self.x - self.x.mean()
        return self.contrast(run / max(float(run @ run), LEAST_VARIANCE))

    def reach(self, error: float, level: float = 0.95, chances: int = 1) -> float:
        """Return half the width of an interval that holds in `level` of runs.

        With `chances`, so do as many intervals at once (Bonferroni).
        """
        tail = (1 - level) / 2 / chances
        return float(t_quantile(1 - tail, self.df)) * error

    def drift(self, level: float) -> tuple[float, float]:
        """Return the interval of the drift per pass in us; it holds in `level`."""
        reach = self.reach(self.drift_error_us, level)
        return self.drift_us - reach, self.drift_us + reach

    def aging(self, level: float) -> tuple[float, float]:
        """Return the interval of the rise with age in us; it holds in `level`."""
        reach = self.reach(self.age_error_us, level)
        return (self.age_us or 0.0) - reach, (self.age_us or 0.0) + reach

    def upper(self, low: int, high: int, level: float) -> float:
        """Return the most by which level `high` may lie above level `low`, in us.

        One-sided: the rise is less than that in `level` of runs.
        """
        rise, error = self.rise(low, high)
        return rise + float(t_quantile(level, self.df)) * error

    def rise(self, low: int, high: int) -> tuple[float, float]:
        """Return by how much level `high` lies above level `low`, and the error."""
        weights = np.zeros(len(self.x))
        weights[high], weights[low] = 1.0, -1.0
        return self.contrast(weights)

    def is_bent(self) -> bool:
        """Return whether the levels do not lie on a straight line (an F test)."""
        design = np.column_stack([np.ones(len(self.x)), self.x])
        left = np.eye(len(self.x)) - design @ np.linalg.pinv(design)
        # Rows that span what a line leaves out.
        _, sizes, rows = np.linalg.svd(left)
        rows = rows[sizes > 0.5]
        if not len(rows):
            return False
        off = rows @ self.level_us
        spread = rows @ self.covariance @ rows.T
        ratio = float(off @ np.linalg.solve(spread, off)) / len(rows)
        return ratio > float(f_quantile(1 - BENT, len(rows), self.df))


def fit(holds: Holds) -> Fit | None:
    """Fit the levels; None if they do not rise, or too few holds tell them apart."""
    levels, level = np.unique(holds.level, return_inverse=True)
    design = _design(holds, level, len(levels))
    x = np.array([holds.x[level == n].mean() for n in range(len(levels))])
    slow = _slowness(holds, x, level, design)
    if (young := _fit(holds.values, x, level, design, slow)) is None:
        return None
    oldest_s = max(float(holds.age_s.max()), LEAST_VARIANCE)
    # Around its mean: the levels are those at the mean age.
    age = (holds.age_s - holds.age_s.mean()) / oldest_s
    if not _tells_age(design, age):
        return young
    aged = _fit(holds.values, x, level, design, slow, age)
    if aged is None:
        return young
    low, high = aged.aging(CERTAIN)
    if low > 0 or high < 0:
        return aged
    return replace(young, aged=aged, age_us=aged.age_us, age_error_us=aged.age_error_us)


def _slowness(holds: Holds, x: Floats, level: Ints, design: Floats) -> Floats | None:
    """Return by how much the control is longer than its server's mean, as a share.

    None without a control, or where the control itself certainly moves with the levels.
    """
    if holds.control is None:
        return None
    own = _fit(holds.control, x, level, design)
    if own is None or _rises(own, 0.0, CERTAIN) or falls(own, 0.0, CERTAIN):
        return None
    slow = np.zeros(len(level))
    for server in np.unique(holds.server):
        here = holds.server == server
        slow[here] = holds.control[here] / holds.control[here].mean() - 1
    return slow


def _fit(
    values: Floats,
    x: Floats,
    level: Ints,
    design: Floats,
    slow: Floats | None = None,
    age: Floats | None = None,
) -> Fit | None:
    """Fit the levels at `x` by `design`, and by slowness and age where they are."""
    count = len(x)
    # Of `design`: levels, a drift for each server, and servers but the first.
    servers = (design.shape[1] - count + 1) // 2
    drifts = list(range(count, count + servers))
    size = _sizes(values, design, level)
    if slow is not None:
        # A share of the level: a slow machine makes a long time longer by more us.
        design = np.column_stack([design, slow * size])
    if age is not None:
        design = np.column_stack([design, age])
    rank, others = (int(np.linalg.matrix_rank(d)) for d in (design, design[:, count:]))
    df = len(level) - rank
    # Levels that something else explains as well, such as time in a single pass.
    if count < 2 or df < 1 or rank - others < count or x[-1] <= x[0]:
        return None
    factors, covariance = _solve(values, design, size, df)
    share = np.full(servers, 1 / servers)
    drift_error = np.sqrt(share @ covariance[np.ix_(drifts, drifts)] @ share)
    aged = age is not None
    return Fit(
        x=x,
        level_us=factors[:count],
        covariance=covariance[:count, :count],
        drift_us=float(share @ factors[drifts]),
        drift_error_us=float(drift_error),
        df=df,
        age_us=float(factors[-1]) if aged else None,
        age_error_us=float(np.sqrt(covariance[-1, -1])) if aged else 0.0,
    )


def _tells_age(design: Floats, age: Floats) -> bool:
    """Return whether age is something else than what `design` has already."""
    own = age - design @ np.linalg.lstsq(design, age, rcond=None)[0]
    return float(own @ own) > LEAST_OWN_AGE * float(age @ age)


def _sizes(values: Floats, design: Floats, level: Ints) -> Floats:
    """Find the size of each level in a few rounds, and return it for each hold."""
    count = int(level.max()) + 1
    size: Floats = np.ones(count)
    for _ in range(ROUNDS):
        weight = 1 / size[level]
        solved = np.linalg.lstsq(design * weight[:, None], values * weight, rcond=None)
        size = np.abs(solved[0][:count])
        size = np.maximum(size, max(LEAST_SHARE * float(size.mean()), LEAST_VARIANCE))
    return size[level]


def _solve(
    values: Floats, design: Floats, size: Floats, df: int
) -> tuple[Floats, Floats]:
    """Fit the factors of `design`, with noise that is a share of `size`.

    Returns the factors and their covariance.
    """
    inverse = np.linalg.pinv(design / size[:, None])
    factors = inverse @ (values / size)
    left = (values - design @ factors) / size
    variance = max(float(left @ left) / df, LEAST_VARIANCE)
    return factors, variance * inverse @ inverse.T


def _design(holds: Holds, level: Ints, count: int) -> Floats:
    """Columns: levels, drift of each server, servers but the first."""
    servers = np.unique(holds.server)
    levels = (level[:, None] == np.arange(count)).astype(float)
    drifts, offsets = [], []
    for server in servers:
        own = holds.server == server
        since = np.where(own, holds.time_s - holds.time_s[own].mean(), 0.0)
        drifts.append(since / _pass_s(holds, own))
        # Around the mean of all servers: the levels are means.
        offsets.append(own.astype(float) - (holds.server == servers[0]))
    return np.column_stack([levels, *drifts, *offsets[1:]])


def _pass_s(holds: Holds, own: Floats) -> float:
    """Return how long a server took for a pass, in which no level is missing."""
    times, count = holds.time_s[own], int(own.sum())
    passes = np.unique(holds.level[own], return_counts=True)[1].min()
    return float(np.ptp(times)) * count / max(count - 1, 1) / passes or 1.0


def growth(fit: Fit, margin_us: float, level: float) -> Shape | None:
    """Return the shape of a rise of more than `margin_us`; None if none is certain.

    All pairs of levels and the straight line are tested at once, each at a Bonferroni
    share of `level`.
    """
    both = [fit] if fit.aged is None else [fit, fit.aged]
    certain = all(_rises(one, margin_us, level) for one in both)
    return _shape(fit, margin_us, level) if certain else None


def _rises(fit: Fit, margin_us: float, level: float) -> bool:
    pairs = list(combinations(range(len(fit.x)), 2))
    across = float(fit.x[-1] - fit.x[0])
    slope, error = fit.slope()
    rises = [(slope * across, error * across), *(fit.rise(*pair) for pair in pairs)]
    return any(
        rise - fit.reach(error, level, len(rises)) > margin_us for rise, error in rises
    )


def falls(fit: Fit, margin_us: float, level: float) -> bool:
    """Return whether a time at a higher level is certainly `margin_us` lower."""
    pairs = list(combinations(range(len(fit.x)), 2))
    rises = [fit.rise(*pair) for pair in pairs]
    return any(
        rise + fit.reach(error, level, len(pairs)) < -margin_us for rise, error in rises
    )


def _shape(fit: Fit, margin_us: float, level: float) -> Shape:
    if falls(fit, margin_us, level):
        return "not monotone"
    if not fit.is_bent():
        return "linear"
    last = len(fit.x) - 1
    rises = [fit.rise(n, n + 1) for n in range(last)]
    whole = max(fit.rise(0, last)[0], max(rise for rise, _ in rises))
    jump = int(np.argmax([rise for rise, _ in rises]))
    others = [
        abs(rise) - fit.reach(error, level, last)
        for n, (rise, error) in enumerate(rises)
        if n != jump
    ]
    # One jump is nearly all of the rise, and no other is certain.
    if rises[jump][0] > 0.7 * whole and max(others, default=0.0) <= 0.1 * whole:
        if jump == last - 1:
            return "only when full"
        return "saturating" if jump == 0 else "step"
    return "curved"


def most_rise_us(fit: Fit, level: float) -> float:
    """Return the most that any level may lie above a lower one, in us.

    That it is less is certain in `level` of runs for the pair with the largest bound,
    and so for all (an intersection-union test, Berger 1982).
    """
    pairs = combinations(range(len(fit.x)), 2)
    return max(fit.upper(low, high, level) for low, high in pairs)
