# SPDX-License-Identifier: Apache-2.0
"""A value with its sampling distribution; quantiles of Student's t and Fisher's F."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Every bootstrap starts from this seed: the same files give the same intervals.
SEED = 20_240_731
REPLICATES = 500
# Angles at which the density of F is summed up.
ANGLES = 40_001


@dataclass(frozen=True)
class Distribution:
    """A value, and draws that are equally likely to be the true one: (draws,).

    Draws come from a bootstrap, or they are the quantiles of a distribution, shuffled.
    """

    value: float
    draws: Floats

    def interval(self, level: float) -> tuple[float, float]:
        """Percentile interval (Efron and Tibshirani 1993, 13.3); `level` as 0.95."""
        low, high = np.quantile(self.draws, ((1 - level) / 2, (1 + level) / 2))
        return float(low), float(high)

    @property
    def ci95(self) -> tuple[float, float]:
        return self.interval(0.95)


def share_of(us: float, covered_us: float) -> float:
    """Compute the share of a time in which steps ran, at most all of it.

    Parts of steps that overlap run at the same time, in several processes.
    """
    return min(us / covered_us, 1.0) if covered_us else 0.0


@lru_cache(maxsize=1_000)
def _f_table(df: int, df_below: int) -> tuple[Floats, Floats]:
    """Tabulate probabilities from 0 to 1 and the F values that have them, (ANGLES,).

    df F / df_below = tan(angle)^2 turns the density of F into that of an angle,
    sin^(df - 1) cos^(df_below - 1) on (0, pi/2): bounded, so a sum over equal steps
    is exact to six digits (Abramowitz and Stegun 1964, 26.5 and 26.6).
    """
    angle = np.linspace(0, np.pi / 2, ANGLES)
    density = np.sin(angle) ** (df - 1) * np.cos(angle) ** (df_below - 1)
    total = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    with np.errstate(over="ignore"):
        return total / total[-1], df_below / df * np.tan(angle) ** 2


def f_quantile(probability: float | Floats, df: int, df_below: int) -> Floats:
    """Compute the quantile of F with `df` and `df_below` degrees of freedom, >= 1."""
    return np.asarray(np.interp(probability, *_f_table(df, df_below)))


def t_quantile(probability: float | Floats, df: int) -> Floats:
    """Compute the quantile of t with `df` >= 1 degrees of freedom: t^2 is F(1, df)."""
    from_middle = 2 * np.asarray(probability, float) - 1
    size = np.sqrt(f_quantile(np.abs(from_middle), 1, df))
    return np.asarray(np.sign(from_middle) * size)
