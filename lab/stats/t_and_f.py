# SPDX-License-Identifier: Apache-2.0
"""Quantiles of Student's t and of Fisher's F, with numpy alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lab.stats.estimate import Floats

ANGLES = 20_001


@lru_cache(maxsize=1_000)
def _f_table(df: int, df_below: int) -> tuple[Floats, Floats]:
    """Probabilities, rising from 0 to 1, and the F values that have them, (ANGLES,).

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
    """The value below which F with `df` and `df_below` >= 1 lies so probably."""
    return np.interp(probability, *_f_table(df, df_below))


def t_quantile(probability: float | Floats, df: int) -> Floats:
    """The value below which t with `df` >= 1 lies so probably: t^2 is F(1, df)."""
    from_middle = 2 * np.asarray(probability, float) - 1
    return np.sign(from_middle) * np.sqrt(f_quantile(np.abs(from_middle), 1, df))
