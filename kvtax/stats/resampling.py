# SPDX-License-Identifier: Apache-2.0
"""Bootstraps over rounds of variants, permutations of holds.

Rounds: variants are measured in turn, once per round, in random order. The machine
drifts from round to round far more than within one, so a round is drawn whole
(percentile bootstrap: Efron and Tibshirani 1993, 13.3). Variants are compared within a
round, and so drift cancels out. Rounds of one machine do not show how another machine
or day differs.

Holds: rare events come in bursts, so whole holds are dealt anew, each within its server
(a permutation test: Davison and Hinkley 1997, 4.3).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtax.stats.distribution import SEED, Distribution, Floats, Ints

ROUND_REPLICATES = 1_000
PERMUTATIONS = 20_000


def over_rounds(
    rounds: Floats, statistic: Callable[[Floats], float] = np.median
) -> Distribution:
    """`statistic` of `rounds`, (rounds,) or (rounds, steps), with rounds resampled.

    A round is drawn whole, with all its steps. Raises ValueError if there is none.
    """
    count = len(rounds)
    if count == 0:
        raise ValueError("no rounds")
    drawn = np.random.default_rng(SEED).integers(count, size=(ROUND_REPLICATES, count))
    if statistic is np.median and rounds.ndim == 1:
        draws = np.median(rounds[drawn], axis=1)
    else:
        draws = np.array([statistic(rounds[index]) for index in drawn], float)
    return Distribution(float(statistic(rounds)), draws)


def difference(values: Floats, base: Floats) -> Distribution:
    """Median over the rounds of `values` minus `base`, both (rounds,)."""
    return over_rounds(values - base)


def ratio(values: Floats, base: Floats) -> Distribution:
    """Median over the rounds of `values` over `base`, both (rounds,), base not 0."""
    return over_rounds(values / base)


def added(times: Floats, base: Floats) -> Distribution:
    """Compute how much longer `times` are than `base`, both (rounds, steps).

    A round counts with its lower quartile: what disturbs a step only ever adds to it.
    """
    return difference(*(np.quantile(of, 0.25, axis=1) for of in (times, base)))


def chance_of_rise(events: Floats, x: Floats, server: Ints) -> float:
    """Compute how often counts that are dealt anew rise with `x` as much or more.

    All are of the same holds (holds,).
    """
    if not events.any():
        return 1.0
    score = x - x.mean()
    rise = float(events @ score)
    rng = np.random.default_rng(SEED)
    dealt = np.zeros(PERMUTATIONS)
    for number in np.unique(server):
        own = np.flatnonzero(server == number)
        order = rng.random((PERMUTATIONS, len(own))).argsort(axis=1)
        dealt += events[own][order] @ score[own]
    as_much = np.count_nonzero(dealt >= rise - 1e-9 * abs(rise))
    return (1 + as_much) / (1 + PERMUTATIONS)
