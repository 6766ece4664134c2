# SPDX-License-Identifier: Apache-2.0
"""The mean over a few server processes, and an interval that holds their differences.

Two processes of one config differ by more than the steps within each of them tell. A
config has only 2 to 5 repeats, which say little about that, so all configs of a run are
pooled: a machine's noise multiplies, so each deviation counts as a share of its
config's level. The model is the random-effects model of a meta-analysis: variance of a
repeat = (share x scale)^2 between processes + its own variance within. The share is
found as by Paule and Mandel (1982), and the interval is Student's t with the degrees of
freedom of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lab.stats.estimate import Estimate, Floats, Ints
from lab.stats.t_and_f import f_quantile, t_quantile

# np.quantile finds each multiple of 1/2,000 among so many draws without interpolating.
DRAWS = 2_001
# The variances within repeats are estimates, too: from some 40 blocks in each.
MAX_DF = 100
# Of the standard error of the spread, so much is added to it. Found by simulation: with
# less, a config with little noise within its repeats is covered less than 93 %.
UNSURE = 0.5
# So rarely does a config stand alone by mere chance.
ALONE = 0.05
HALVINGS = 60
# And the pool does without it if chance explains it as rarely as that.
OUTSIDE = 0.01
ROUNDS = 3
# Pocock (1977), constants for 1, 2, ... looks: Jennison and Turnbull (2000), table 2.1.
POCOCK = (1.960, 2.178, 2.289, 2.361, 2.413, 2.453, 2.485, 2.512, 2.535, 2.555)


@dataclass(frozen=True)
class Repeats:
    """One config's estimates of one metric, one per process; R of them, at least 1.

    values: (R,), in any unit. variances: (R,), in that unit squared, how well each
    process by itself is known (a block bootstrap within it). scale: above 0, in that
    unit: what the differences between processes are a share of, such as the metric's
    level. Raises ValueError for anything else.
    """

    values: Floats
    variances: Floats
    scale: float

    def __post_init__(self) -> None:
        if not len(self.values) == len(self.variances) > 0:
            raise ValueError(
                f"{len(self.values)} values with {len(self.variances)} variances:"
                " each repeat has one of both"
            )
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}: it must be above 0")

    def first(self, count: int) -> Repeats:
        """The first `count` of them, or all that there are."""
        return Repeats(self.values[:count], self.variances[:count], self.scale)

    @property
    def within(self) -> float:
        """Mean variance within a repeat, as a share of scale squared."""
        return float(np.mean(self.variances)) / self.scale**2

    @property
    def own(self) -> float:
        """Variance of the values, as a share of scale squared; 0 for one value."""
        if len(self.values) == 1:
            return 0.0
        return float(np.var(self.values, ddof=1)) / self.scale**2


@dataclass(frozen=True)
class Spread:
    """How much processes of one config differ: variances, as shares of scale squared.

    between: of the processes' true values. error: the standard error of `between`.
    df: how many deviations it comes from; with 0 nothing is known.
    """

    between: Floats | float
    error: Floats | float
    df: int

    @property
    def share(self) -> float:
        """The standard deviation between processes as a share of scale."""
        return float(np.sqrt(self.between))


def between_spread(groups: Iterable[Repeats]) -> Spread:
    """The spread between processes, pooled over configs; one repeat adds nothing."""
    several = [group for group in groups if len(group.values) > 1]
    own = np.array([group.own for group in several])
    within = np.array([group.within for group in several])
    return pooled(own, within, np.array([len(group.values) - 1 for group in several]))


def pooled(own: Floats, within: Floats, df: Ints) -> Spread:
    """The spread of `Repeats.own` and `.within`, (..., configs), with `df` (configs,).

    Paule and Mandel: the variance between processes at which the deviations, each over
    its expected variance, sum to their degrees of freedom; 0 where less is enough. One
    config that was measured while the machine was disturbed must not widen all others:
    what the rest explain so rarely (OUTSIDE) is left out.
    """
    if int(df.sum()) == 0:
        return Spread(np.nan, np.nan, 0)
    counts = np.broadcast_to(df, own.shape).astype(float)
    spread = _paule_mandel(own, within, counts)
    for _ in range(ROUNDS):
        expected = np.asarray(spread.between)[..., None] + within
        rest = np.maximum(df.sum() - df, 1)
        bounds = np.array(
            [f_quantile(1 - OUTSIDE, a, b) for a, b in zip(df, rest, strict=True)]
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            outside = own / expected > bounds
        counts = np.where(outside & (df.sum() > df), 0.0, df)
        spread = _paule_mandel(own, within, counts)
    return spread


def _paule_mandel(own: Floats, within: Floats, df: Floats) -> Spread:
    """As `pooled`, of all that have any `df`, (..., configs)."""
    total = df.sum(axis=-1)
    low, high = np.zeros(own.shape[:-1]), (own * df).sum(axis=-1) / np.maximum(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            more = (own * df / (middle[..., None] + within)).sum(axis=-1) > total
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        # By the delta method: the sum has the variance 2 total.
        slope = (df / (low[..., None] + within)).sum(axis=-1)
        error = np.sqrt(2 * total) / slope
    # What a single config differs by is all there is, and its t knows how little.
    error = np.where((df > 0).sum(axis=-1) > 1, error, 0.0)
    return Spread(low, error, int(np.max(total)))


def variance_of_mean(
    own: Floats, within: Floats, repeats: int, spread: Spread
) -> tuple[Floats, Ints]:
    """(variance of the mean over `repeats`, its df) of configs; arrays are (...,).

    Variances are shares of scale squared. Where a config's own repeats differ by far
    more than the spread explains (an F test), only they count.
    """
    known = spread.between + within
    # The spread itself may be larger than it looks.
    one, df = known + UNSURE * spread.error, min(spread.df, MAX_DF)
    if repeats == 1:
        return one, np.full(np.shape(one), df)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(own / known, nan=0)
    alone = ratio > f_quantile(1 - ALONE, repeats - 1, df)
    return np.where(alone, own, one) / repeats, np.where(alone, repeats - 1, df)


def over_processes(repeats: Repeats, spread: Spread, seed: int) -> Estimate:
    """The mean over the repeats; its draws are the quantiles of a t, shuffled.

    Estimates that are subtracted or divided need different seeds: equal ones pair
    large draws with large ones. From one repeat without a pool (`spread.df` is 0) the
    draws are NaN: a value without an interval.
    """
    value, count = float(np.mean(repeats.values)), len(repeats.values)
    if spread.df == 0:
        return Estimate(value, np.full(DRAWS, np.nan))
    own, within = np.array(repeats.own), np.array(repeats.within)
    variance, df = variance_of_mean(own, within, count, spread)
    # The ends would be infinite.
    levels = np.linspace(0, 1, DRAWS).clip(1 / (4 * DRAWS), 1 - 1 / (4 * DRAWS))
    error = float(np.sqrt(variance)) * repeats.scale
    draws = value + error * t_quantile(levels, int(df))
    return Estimate(value, np.random.default_rng(seed).permutation(draws))


def look_level(looks: int) -> float:
    """The level of each interval such that in 95 % of runs none of `looks` is wrong.

    For a run that goes on, looks again, and may stop after any look (Pocock 1977).
    Raises ValueError for fewer than 1 or more than 10 looks.
    """
    if not 1 <= looks <= len(POCOCK):
        raise ValueError(f"{looks} looks: 1 to {len(POCOCK)} are possible")
    return 2 * NormalDist().cdf(POCOCK[looks - 1]) - 1
