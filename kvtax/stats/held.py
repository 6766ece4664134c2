# SPDX-License-Identifier: Apache-2.0
"""Levels of a time along an axis that was held at one level after the other.

A hold is one value: the time at one level in one pass of one server. A server goes up
the levels in each pass and falls back between two of them, so a machine that gets
slower rises through the passes as well, and a growing cost does not: both are fitted
at once. How slow the machine was in each hold can be fitted, too. A hold in which
something disturbed it may be as noisy as others or far noisier: it weighs as much as
the holds themselves make most likely.

    value of a hold = level + server + drift of the server * time + share of slowness

Intervals are Student's t from what is left over (analysis of covariance).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

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
# A smaller share of the largest singular value is a column that is not known.
LEAST_SPREAD = 1e-12
# Noise of a hold is as its disturbance to one of these powers.
POWERS = (0.0, 1.0, 2.0, 3.0)
# So rarely is a straight line taken for a bend.
BENT = 0.01


@dataclass(frozen=True)
class Holds:
    """Holds of one config, each an element of arrays (holds,).

    `level` counts from 0 up; `x` is what the axis really was. `slowness` is (holds,
    works), above 0: how slow the machine was by each of some works, 1 as usual.
    `disturbance` is how many times as slow as in quiet holds, at least 1.
    """

    server: Ints
    level: Ints
    x: Floats
    time_s: Floats
    slowness: Floats
    disturbance: Floats
    values: Floats


@dataclass(frozen=True)
class Fit:
    """Levels (levels,) of a time in us, `x` of each, and how well they are known.

    `covariance` is that of the levels, `drift_us` by how much the time rises in one
    pass without the axis, `df` what the variance of a hold is known from.
    """

    x: Floats
    level_us: Floats
    covariance: Floats
    drift_us: float
    drift_error_us: float
    df: int

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
    """Fit the levels; None if they do not rise, or too few holds tell them apart.

    A slow machine makes a long time longer by more us than a short one: slowness and
    noise are shares of the level, found in a few rounds.
    """
    levels, level = np.unique(holds.level, return_inverse=True)
    count = len(levels)
    design = _design(holds, level, count)
    rank, others = (int(np.linalg.matrix_rank(d)) for d in (design, design[:, count:]))
    df = len(level) - rank
    # Levels that something else explains as well, such as time in a single pass.
    if count < 2 or df < 1 or rank - others < count:
        return None
    x = np.array([holds.x[level == n].mean() for n in range(count)])
    if x[-1] <= x[0]:
        return None
    size = _sizes(holds, design, level)
    tried = [_solve(holds, design, size, df, power) for power in POWERS]
    likeliest = max(tried, key=lambda one: one.likelihood)
    found, covariance = likeliest.factors, likeliest.covariance
    servers = len(np.unique(holds.server))
    drifts = list(range(count, count + servers))
    share = np.full(servers, 1 / servers)
    drift_error = np.sqrt(share @ covariance[np.ix_(drifts, drifts)] @ share)
    return Fit(
        x=x,
        level_us=found[:count],
        covariance=covariance[:count, :count],
        drift_us=float(share @ found[drifts]),
        drift_error_us=float(drift_error),
        df=df,
    )


class _Solved(NamedTuple):
    factors: Floats
    covariance: Floats
    likelihood: float


def _sizes(holds: Holds, design: Floats, level: Ints) -> Floats:
    """Find the size of each level in a few rounds, and return it for each hold."""
    count = int(level.max()) + 1
    size: Floats = np.ones(count)
    for _ in range(ROUNDS):
        scaled = _scaled(holds, design, size[level])
        values = holds.values / size[level]
        size = np.abs(np.linalg.lstsq(scaled, values, rcond=None)[0][:count])
        size = np.maximum(size, max(LEAST_SHARE * float(size.mean()), LEAST_VARIANCE))
    return size[level]


def _scaled(holds: Holds, design: Floats, size: Floats) -> Floats:
    """Divide all columns but those of slowness, which are shares of the size."""
    scaled = design / size[:, None]
    shares = slice(design.shape[1] - holds.slowness.shape[1], None)
    scaled[:, shares] = design[:, shares]
    return scaled


def _solve(
    holds: Holds, design: Floats, size: Floats, df: int, power: float
) -> _Solved:
    """Fit the factors of `design`, with noise as the disturbance to the `power`.

    The likelihood is the restricted one of normal noise (Patterson, Thompson 1971).
    """
    noise = holds.disturbance**power
    weighted = _scaled(holds, design, size) / noise[:, None]
    values = holds.values / (size * noise)
    inverse = np.linalg.pinv(weighted)
    factors = inverse @ values
    left = values - weighted @ factors
    variance = max(float(left @ left) / df, LEAST_VARIANCE)
    spread = np.linalg.svd(weighted, compute_uv=False)
    spread = spread[spread > LEAST_SPREAD * spread[0]]
    likelihood = -np.log(noise).sum() - np.log(spread).sum() - df * np.log(variance) / 2
    return _Solved(factors, variance * inverse @ inverse.T, float(likelihood))


def _design(holds: Holds, level: Ints, count: int) -> Floats:
    """Columns: levels, drift of each server, servers but the first, slowness."""
    servers = np.unique(holds.server)
    levels = (level[:, None] == np.arange(count)).astype(float)
    drifts, offsets = [], []
    for server in servers:
        own = holds.server == server
        since = np.where(own, holds.time_s - holds.time_s[own].mean(), 0.0)
        drifts.append(since / _pass_s(holds, own))
        # Around the mean of all servers: the levels are means.
        offsets.append(own.astype(float) - (holds.server == servers[0]))
    slowness = np.log(holds.slowness)
    slowness = slowness - slowness.mean(axis=0)
    return np.column_stack([levels, *drifts, *offsets[1:], slowness])


def _pass_s(holds: Holds, own: Floats) -> float:
    """Return how long a server took for a pass."""
    first = np.sort(holds.time_s[own & (holds.level == holds.level[own].min())])
    return float(np.diff(first).mean()) if len(first) > 1 else 1.0


def growth(fit: Fit, margin_us: float, level: float) -> Shape | None:
    """Return the shape of a rise of more than `margin_us`; None if none is certain.

    All pairs of levels and the straight line are tested at once, each at a Bonferroni
    share of `level`.
    """
    pairs = list(combinations(range(len(fit.x)), 2))
    across = float(fit.x[-1] - fit.x[0])
    slope, error = fit.slope()
    rises = [(slope * across, error * across), *(fit.rise(*pair) for pair in pairs)]
    certain = any(
        rise - fit.reach(error, level, len(rises)) > margin_us for rise, error in rises
    )
    return _shape(fit, margin_us, level) if certain else None


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
