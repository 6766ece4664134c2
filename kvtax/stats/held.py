# SPDX-License-Identifier: Apache-2.0
"""Levels of a quantity along an axis that was held at one level after the other.

A hold is one value: the quantity at one level of one server. The levels come in random
order, and before a lower one the axis is reset. So neither a machine that gets slower
nor a cost that rises with the time since the reset looks like a level; both are fitted
beside the levels.

    value of a hold = level + server + drift of the server * time [+ rise * age]

A higher level is older, as a rule: with the age in the fit, levels are known half as
well. So it is in the fit where it matters for certain. Where it may matter, growth must
be certain with it, too.

Noise is a share of the level. Intervals are Student's t from what is left over
(analysis of covariance). They are of the servers that were measured; with `between`,
the share by which a level differs between servers, they hold the next server's, too.
One server leaves few values over. With the `noise` of the other configs, which ran on
the same machine, the variance of a hold is known better (kvtax/stats/noise.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from kvtax.stats.distribution import Floats, Ints, f_quantile, t_quantile
from kvtax.stats.noise import Noise, shared_noise

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
# Fewer values left over say too little of the noise to fit a drift beside it.
LEAST_LEFT = 2
# Rounds until the levels' sizes are those that they were weighted by.
ROUNDS = 4
# Ages are told from levels if so much of their variance is not the levels'.
LEAST_OWN_AGE = 0.1
# The age is in the fit if it matters so certainly.
CERTAIN = 0.99
# So rarely is a straight line taken for a bend.
BENT = 0.01


@dataclass(frozen=True)
class Holds:
    """Holds of one config, each an element of arrays (holds,).

    `level` counts from 0 up; `x` is the true place on the axis. `time_s` is when it was
    held, `age_s` the time since the reset.
    """

    server: Ints
    level: Ints
    x: Floats
    time_s: Floats
    age_s: Floats
    values: Floats


@dataclass(frozen=True)
class Fit:
    """Levels (levels,) of a quantity, `x` of each, and how well they are known.

    `covariance` is that of the levels. `drift` is the rise in one pass without the
    axis, `age` the rise in the longest time since a reset, None where age and level are
    the same; `df` are the degrees of freedom of the variance of a hold. `aged` is the
    fit with the age in it, None if this is it, or there is none.
    """

    x: Floats
    levels: Floats
    covariance: Floats
    drift: float
    drift_error: float
    df: int
    age: float | None
    age_error: float
    aged: Fit | None = None

    @property
    def last(self) -> int:
        """Return the number of the highest level."""
        return len(self.x) - 1

    @property
    def across(self) -> float:
        """Return the range of the axis."""
        return float(self.x[-1] - self.x[0])

    def contrast(self, weights: Floats) -> tuple[float, float]:
        """Return the weighted sum of the levels, and its standard error."""
        error = float(np.sqrt(max(float(weights @ self.covariance @ weights), 0.0)))
        return float(weights @ self.levels), error

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

    def drift_interval(self, level: float) -> tuple[float, float]:
        """Return the interval of the drift per pass; it holds in `level` of runs."""
        reach = self.reach(self.drift_error, level)
        return self.drift - reach, self.drift + reach

    def age_interval(self, level: float) -> tuple[float, float]:
        """Return the interval of the rise with age; it holds in `level` of runs."""
        reach = self.reach(self.age_error, level)
        return (self.age or 0.0) - reach, (self.age or 0.0) + reach

    def upper(self, low: int, high: int, level: float) -> float:
        """Return the most by which level `high` may lie above level `low`.

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
        # Rows that span the part that a line leaves out.
        _, sizes, rows = np.linalg.svd(left)
        rows = rows[sizes > 0.5]
        if not len(rows):
            return False
        off = rows @ self.levels
        spread = rows @ self.covariance @ rows.T
        ratio = float(off @ np.linalg.solve(spread, off)) / len(rows)
        return ratio > float(f_quantile(1 - BENT, len(rows), self.df))


@dataclass(frozen=True)
class Others:
    """Spread of a quantity, estimated from all configs of a run.

    `between` is the share by which a level differs between servers, `noise` that by
    which holds of a level differ.
    """

    between: float = 0.0
    noise: Noise | None = None

    @classmethod
    def of(cls, configs: Iterable[Holds], days: float = 0.0) -> Others:
        """Estimate both from the holds of all configs; `days` adds to `between`."""
        holds = list(configs)
        between = float(np.hypot(share_between_servers(holds), days))
        return cls(between, shared_noise(_left_of(own) for own in holds))


ALONE = Others()


def fit(holds: Holds, others: Others = ALONE) -> Fit | None:
    """Fit the levels; None if they do not rise, or too few holds tell them apart."""
    design = _Design.of(holds)
    if (young := _fit(holds.values, design, others)) is None:
        return None
    oldest_s = max(float(holds.age_s.max()), LEAST_VARIANCE)
    # Around its mean: the levels are those at the mean age.
    age = (holds.age_s - holds.age_s.mean()) / oldest_s
    if not _tells_age(design.matrix, age):
        return young
    aged = _fit(holds.values, design, others, age)
    if aged is None:
        return young
    low, high = aged.age_interval(CERTAIN)
    if low > 0 or high < 0:
        return aged
    return replace(young, aged=aged, age=aged.age, age_error=aged.age_error)


@dataclass(frozen=True)
class _Design:
    """Columns of a fit: levels, a drift for each server, and servers but the first.

    With few holds the fit has no drifts, as long as drifts tell the levels apart.
    """

    matrix: Floats
    x: Floats
    level: Ints
    servers: int
    rises: bool

    @classmethod
    def of(cls, holds: Holds) -> _Design:
        levels, level = np.unique(holds.level, return_inverse=True)
        count = len(levels)
        x = np.array([holds.x[level == n].mean() for n in range(count)])
        servers = np.unique(holds.server)
        dummies = (level[:, None] == np.arange(count)).astype(float)
        drifts, offsets = [], []
        for server in servers:
            own = holds.server == server
            since = np.where(own, holds.time_s - holds.time_s[own].mean(), 0.0)
            drifts.append(since / _pass_s(holds, own))
            # Around the mean of all servers: the levels are means.
            offsets.append(own.astype(float) - (holds.server == servers[0]))
        matrix = np.column_stack([dummies, *drifts, *offsets[1:]])
        rank, besides = (np.linalg.matrix_rank(d) for d in (matrix, matrix[:, count:]))
        # Levels that something else explains as well, such as time in a single pass.
        rises = count >= 2 and rank - besides >= count and x[-1] > x[0]
        if rises and len(level) - rank < LEAST_LEFT:
            matrix[:, count : count + len(servers)] = 0.0
        return cls(matrix, x, level, len(servers), bool(rises))


def _fit(
    values: Floats, design: _Design, others: Others, age: Floats | None = None
) -> Fit | None:
    """Fit the levels by `design`, and by the age where it is given."""
    matrix, count = design.matrix, len(design.x)
    size = _sizes(values, matrix, design.level)
    if age is not None:
        matrix = np.column_stack([matrix, age])
    rank, besides = (int(np.linalg.matrix_rank(d)) for d in (matrix, matrix[:, count:]))
    df = len(values) - rank
    too_few = df < (0 if others.noise else 1)
    if not design.rises or rank - besides < count or too_few:
        return None
    factors, squares, unscaled = _solve(values, matrix, size)
    if others.noise is not None:
        variance, df = others.noise.with_own(squares, df)
    else:
        variance = squares / df
    covariance = max(variance, LEAST_VARIANCE) * unscaled
    drifts = slice(count, count + design.servers)
    share = np.full(design.servers, 1 / design.servers)
    level_sizes = np.array([size[design.level == n][0] for n in range(count)])
    of_servers = np.diag((others.between * level_sizes) ** 2 / design.servers)
    aged = age is not None
    return Fit(
        x=design.x,
        levels=factors[:count],
        covariance=covariance[:count, :count] + of_servers,
        drift=float(share @ factors[drifts]),
        drift_error=float(np.sqrt(share @ covariance[drifts, drifts] @ share)),
        df=df,
        age=float(factors[-1]) if aged else None,
        age_error=float(np.sqrt(covariance[-1, -1])) if aged else 0.0,
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
    values: Floats, design: Floats, size: Floats
) -> tuple[Floats, float, Floats]:
    """Fit the factors of `design`, with noise that is a share of `size`.

    Returns the factors, the squares that are left over as shares of `size`, and the
    factors' covariance where the variance of a hold is 1.
    """
    inverse = np.linalg.pinv(design / size[:, None])
    factors = inverse @ (values / size)
    left = (values - design @ factors) / size
    return factors, float(left @ left), inverse @ inverse.T


def _pass_s(holds: Holds, own: Floats) -> float:
    """Return how long a server took for a pass, in which no level is missing."""
    times, count = holds.time_s[own], int(own.sum())
    passes = np.unique(holds.level[own], return_counts=True)[1].min()
    return float(np.ptp(times)) * count / max(count - 1, 1) / passes or 1.0


def share_between_servers(configs: Iterable[Holds]) -> float:
    """Estimate the share by which a level differs between servers of one config.

    The variance between servers beyond that between holds, pooled over the configs: the
    squares that levels of each server explain more than levels and servers alone
    (analysis of variance, method of moments). 0 without a config of two servers.
    """
    squares = noise = 0.0
    degrees = noise_degrees = holds_of_a_level = 0
    for holds in configs:
        design = _Design.of(holds)
        if design.servers < 2:
            continue
        size = _sizes(holds.values, design.matrix, design.level)
        each = holds.server * (int(design.level.max()) + 1) + design.level
        own = (each[:, None] == np.unique(each)).astype(float)
        drifts = design.matrix[:, len(design.x) : len(design.x) + design.servers]
        apart = np.column_stack([own, drifts])
        alike_left, alike_df = _left_over(holds.values, design.matrix, size)
        apart_left, apart_df = _left_over(holds.values, apart, size)
        squares += alike_left - apart_left
        degrees += alike_df - apart_df
        noise += apart_left
        noise_degrees += apart_df
        holds_of_a_level += len(holds.values) * (alike_df - apart_df) // own.shape[1]
    if not degrees or not noise_degrees or not holds_of_a_level:
        return 0.0
    beyond = squares / degrees - noise / noise_degrees
    return float(np.sqrt(max(beyond, 0.0) * degrees / holds_of_a_level))


def _left_of(holds: Holds) -> tuple[float, int]:
    """Return the squares that the fit of a config leaves, and their number."""
    design = _Design.of(holds)
    size = _sizes(holds.values, design.matrix, design.level)
    return _left_over(holds.values, design.matrix, size)


def _left_over(values: Floats, design: Floats, size: Floats) -> tuple[float, int]:
    """Return the squares that a fit leaves, as shares of `size`, and their number."""
    weighted, scaled = design / size[:, None], values / size
    left = scaled - weighted @ np.linalg.lstsq(weighted, scaled, rcond=None)[0]
    return float(left @ left), len(values) - int(np.linalg.matrix_rank(design))


def growth(fit: Fit, margin: float, level: float) -> Shape | None:
    """Return the shape of a rise of more than `margin`; None if none is certain.

    All pairs of levels and the straight line are tested at once, each at a Bonferroni
    share of `level`.
    """
    both = [fit] if fit.aged is None else [fit, fit.aged]
    certain = all(_rises(either, margin, level) for either in both)
    return _shape(fit, margin, level) if certain else None


def _rises(fit: Fit, margin: float, level: float) -> bool:
    pairs = list(combinations(range(len(fit.x)), 2))
    slope, error = fit.slope()
    rises = [(slope * fit.across, error * fit.across)]
    rises += [fit.rise(*pair) for pair in pairs]
    return any(
        rise - fit.reach(error, level, len(rises)) > margin for rise, error in rises
    )


def falls(fit: Fit, margin: float, level: float) -> bool:
    """Return whether a higher level is certainly lower by more than `margin`."""
    pairs = list(combinations(range(len(fit.x)), 2))
    rises = [fit.rise(*pair) for pair in pairs]
    return any(
        rise + fit.reach(error, level, len(pairs)) < -margin for rise, error in rises
    )


def _shape(fit: Fit, margin: float, level: float) -> Shape:
    if falls(fit, margin, level):
        return "not monotone"
    if not fit.is_bent():
        return "linear"
    last = fit.last
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


def most_rise(fit: Fit, level: float) -> float:
    """Return the most that any level may lie above a lower one.

    That it is less is certain in `level` of runs for the pair with the largest bound,
    and so for all (an intersection-union test, Berger 1982).
    """
    pairs = combinations(range(len(fit.x)), 2)
    return max(fit.upper(low, high, level) for low, high in pairs)
