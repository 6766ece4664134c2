# SPDX-License-Identifier: Apache-2.0
"""Estimates from rounds: variants measured in turn, once per round, in random order.

The machine drifts from round to round far more than within one, so a round is the unit
that is resampled: percentile bootstrap (Efron and Tibshirani 1993, 13.3), fixed seed.
Variants are compared within a round, and so drift cancels out. Rounds that were
measured in turn on one machine do not show how another machine or day differs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lab.stats.estimate import SEED, Estimate

Floats = NDArray[np.float64]

REPLICATES = 1_000


def over_rounds(
    rounds: Floats, statistic: Callable[[Floats], float] = np.median
) -> Estimate:
    """`statistic` of `rounds`, (rounds,) or (rounds, steps), with rounds resampled.

    A round is drawn whole, with all its steps. Raises ValueError if there is none.
    """
    count = len(rounds)
    if count == 0:
        raise ValueError("no rounds")
    drawn = np.random.default_rng(SEED).integers(count, size=(REPLICATES, count))
    draws = np.array([statistic(rounds[index]) for index in drawn], float)
    return Estimate(float(statistic(rounds)), draws)


def difference(values: Floats, base: Floats) -> Estimate:
    """Median over the rounds of `values` minus `base`, both (rounds,)."""
    return over_rounds(values - base)


def ratio(values: Floats, base: Floats) -> Estimate:
    """Median over the rounds of `values` over `base`, both (rounds,), base not 0."""
    return over_rounds(values / base)


def added(times: Floats, base: Floats) -> Estimate:
    """How much longer `times` are than `base`, both (rounds, steps).

    A round counts with its lower quartile: what disturbs a step only ever adds to it.
    """
    return difference(*(np.quantile(of, 0.25, axis=1) for of in (times, base)))
