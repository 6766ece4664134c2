# SPDX-License-Identifier: Apache-2.0
"""Noise of a hold, estimated from the holds of all configs of a run.

One server leaves one to six values over for the noise of its holds, and Student's t of
one value is 13 times the error. The other configs ran on the same machine: their
variances are draws from a common distribution, a scaled inverse chi-squared one. A
config's own variance is taken together with the mean of that distribution, which weighs
as many values as the configs agree in (empirical Bayes, Smyth 2004, "Linear models and
empirical Bayes methods", Stat. Appl. Genet. Mol. Biol. 3(1) art. 3, sections 3 and 6).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvtax.stats.distribution import Floats

# Variances of fewer configs say nothing of a distribution.
FEWEST_CONFIGS = 4
# Values with less variance do not vary, such as those of no calls at all.
NO_VARIANCE = 1e-10
# Halves of degrees of freedom that are tried; the last stands for any number.
HALVES: Floats = np.asarray(np.geomspace(0.1, 500.0, 400), np.float64)
# The distribution weighs at most this share of the values that it is known from.
MOST_WEIGHT = 0.5
# Terms of the series of digamma and trigamma before the asymptotic rest.
TERMS = 30


@dataclass(frozen=True)
class Noise:
    """Variance of a hold that configs share, which weighs `df` values."""

    variance: float
    df: int

    def with_own(self, squares: float, df: int) -> tuple[float, int]:
        """Return the variance of a config, and the number of values that it is of.

        `squares` is the sum that its own fit leaves, of `df` values, or of none.
        """
        together = self.df + df
        return (self.df * self.variance + squares) / together, together


def shared_noise(left_over: Iterable[tuple[float, int]]) -> Noise | None:
    """Estimate the noise that configs share; None if they are too few, or disagree.

    `left_over` has each config's sum of squares, and the number of values it is of.
    """
    left = [(squares, df) for squares, df in left_over if df > 0]
    known = np.array([own for own in left if own[0] > own[1] * NO_VARIANCE])
    if len(known) < FEWEST_CONFIGS:
        return None
    halves = known[:, 1] / 2
    logs = np.log(known[:, 0] / known[:, 1]) - _digamma(halves) + np.log(halves)
    excess = float(logs.var(ddof=1) - _trigamma(halves).mean())
    half = float(np.interp(excess, _trigamma(HALVES)[::-1], HALVES[::-1]))
    variance = np.exp(logs.mean() + float(_digamma(np.array(half))) - np.log(half))
    # What it weighs is itself known from few values.
    df = int(min(2 * half, MOST_WEIGHT * known[:, 1].sum()))
    return Noise(float(variance), df) if df else None


def _digamma(x: Floats) -> Floats:
    """Compute digamma of x > 0 (Abramowitz and Stegun 1964, 6.3.6 and 6.3.18)."""
    n, z = np.arange(TERMS), x + TERMS
    rest = np.log(z) - 1 / (2 * z) - 1 / (12 * z**2)
    return np.asarray(rest - (1 / (x[..., None] + n)).sum(axis=-1))


def _trigamma(x: Floats) -> Floats:
    """Compute trigamma of x > 0 (Abramowitz and Stegun 1964, 6.4.6 and 6.4.12)."""
    n, z = np.arange(TERMS), x + TERMS
    rest = 1 / z + 1 / (2 * z**2) + 1 / (6 * z**3)
    return np.asarray(rest + (1 / (x[..., None] + n) ** 2).sum(axis=-1))
