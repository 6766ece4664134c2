# SPDX-License-Identifier: Apache-2.0
"""Least-squares fits: several axes at once, lines, powers.

Intervals of a fit on neighbouring steps are the widest of three jackknifes that leave
out stretches of time (Kunsch 1989), short and long ones: they hold for noise that is
forgotten within the longest, a fifth of the time.
"""

from __future__ import annotations

import numpy as np

from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import Floats, t_quantile

# Stretches of time that the jackknife leaves out in turn.
STRETCHES = 20
# Neighbouring stretches that are left out together.
TOGETHER = (1, 2, 4)
# Exponents p of a + b x^p that are tried.
EXPONENTS = np.linspace(0.2, 3.0, 141)


def share_explained_by_others(matrix: Floats) -> Floats:
    """Compute, for each column, the share of its variance that the others explain."""
    shares = np.zeros(matrix.shape[1])
    for index in range(matrix.shape[1]):
        others = np.delete(matrix, index, axis=1)
        own = matrix[:, index] - matrix[:, index].mean()
        design = np.column_stack([np.ones(len(own)), others])
        left = own - design @ np.linalg.lstsq(design, own, rcond=None)[0]
        shares[index] = 1 - float((left**2).sum()) / max(float((own**2).sum()), 1e-12)
    return shares


def jackknifed_slopes(matrix: Floats, values: Floats) -> list[list[Estimate]]:
    """Fit an offset and a slope per axis; leave out stretches of the rows in turn.

    `matrix` is (rows, axes) and `values` (rows, times), both in order of time. Returns
    the slopes by axis, for each time.
    """
    design = np.column_stack([np.ones(len(values)), matrix])
    ends = -(-np.arange(1, STRETCHES) * len(values) // STRETCHES)
    # A stretch in as few rows as there are columns, with the same slopes.
    stretches = []
    for rows, own in zip(np.split(design, ends), np.split(values, ends), strict=True):
        q, r = np.linalg.qr(rows)
        stretches.append((r, q.T @ own))

    def fit(left_out: range) -> Floats:
        rows, own = zip(
            *(part for i, part in enumerate(stretches) if i not in left_out),
            strict=True,
        )
        factors: Floats = np.linalg.lstsq(np.vstack(rows), np.vstack(own), rcond=None)[
            0
        ]
        return factors[1:].T

    def reach_of(together: int) -> Floats:
        starts = range(0, STRETCHES, together)
        without = np.stack([fit(range(i, i + together)) for i in starts])
        spread = np.sqrt((len(starts) - 1) * without.var(axis=0))
        return np.asarray(float(t_quantile(0.975, len(starts) - 1)) * spread)

    whole = fit(range(0))
    reach = np.max([reach_of(together) for together in TOGETHER], axis=0)
    edges = np.stack([whole, whole - reach, whole + reach], axis=2).tolist()
    return [
        [Estimate(value, (low, high)) for value, low, high in of_time]
        for of_time in edges
    ]


def line_of_sums(sums: Floats) -> tuple[Floats, Floats]:
    """Fit slope and intercept to sums of (1, x, y, xx, xy), shape (5, ...).

    Both are NaN where x does not vary.
    """
    n, x, y, xx, xy = sums
    spread = n * xx - x * x
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 1e-9 * n * xx, (n * xy - x * y) / spread, np.nan)
        return slope, (y - slope * x) / n


def exponent(x: Floats, y: Floats) -> float:
    """Fit a + b x^p and return p, one of EXPONENTS; x is above 0."""
    powers = (x / x.max()) ** EXPONENTS[:, None]
    run = powers - powers.mean(axis=1, keepdims=True)
    rise = y - y.mean()
    slope = (run @ rise) / (run**2).sum(axis=1)
    left = ((rise - slope[:, None] * run) ** 2).sum(axis=1)
    return float(EXPONENTS[np.argmin(left)])
