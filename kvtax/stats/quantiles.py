# SPDX-License-Identifier: Apache-2.0
"""Weighted quantiles, and medians and quantiles with intervals.

`median_of_passes` needs no model: a sign test.

`SessionDraws` draws sessions (cluster bootstrap: Davison and Hinkley 1997, 3.8).
Requests of one session share their prefix, their instance and their think times, so the
session is drawn with replacement, and all its requests in all repeats with it. Every
arm is drawn with the same sessions, so a difference between two arms is paired. How
much one run differs from the next is not in these draws:
kvtax.stats.processes.RunSpread adds it.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import Quantiles
from kvtax.stats.distribution import REPLICATES, SEED, Distribution, Floats, Ints

# Fewer sessions than this give no interval worth stating.
MIN_SESSIONS = 8
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# A quantile with less than one request beyond it is the maximum under another name.
MIN_REQUESTS = {"p50": 1, "p90": 10, "p99": 100}
# Weights held at once: replicates x requests, 8 bytes each.
CHUNK = 4_000_000
# Probability of each tail outside a 95 % interval.
TAIL = 0.025


def quantile(values: pl.Series, q: float) -> float | None:
    """Return the least value that a share of `q` of the values is not above.

    The one definition of a quantile (Hyndman and Fan 1996, definition 1): a value that
    was measured. None without any.
    """
    known = values.drop_nulls().to_numpy()
    if not len(known):
        return None
    return float(np.quantile(known, q, method="inverted_cdf"))


def quantiles(values: pl.Series, digits: int = 3) -> Quantiles | None:
    """Return p50, p90 and p99 of the values; None without any."""
    known = values.drop_nulls().cast(pl.Float64).to_numpy()
    if not len(known):
        return None
    points = np.quantile(known, list(QUANTILES.values()), method="inverted_cdf")
    return Quantiles(*(round(float(point), digits) for point in points))


def weighted_quantiles(
    values: Floats, weights: Floats, quantiles: tuple[float, ...]
) -> list[float]:
    """Smallest values at which the summed weight reaches each quantile."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    index = np.searchsorted(total, np.asarray(quantiles) * total[-1] * (1 - 1e-12))
    return [float(v) for v in values[order][np.minimum(index, len(values) - 1)]]


def slope_within_groups(
    x: Floats, y: Floats, weights: Floats, group: Ints
) -> float | None:
    """Return the median of the slopes of all pairs of a group; None if x is constant.

    A pair weighs as its points do, and as they are apart (Theil 1950, Sen 1968).
    """
    slopes, sizes = [np.zeros(0)], [np.zeros(0)]
    for number in np.unique(group):
        own = np.flatnonzero(group == number)
        first, second = (own[of] for of in np.triu_indices(len(own), 1))
        apart = x[second] - x[first]
        differs = apart != 0
        rise = (y[second] - y[first])[differs]
        slopes.append(rise / apart[differs])
        sizes.append((weights[first] * weights[second] * np.abs(apart))[differs])
    every = np.concatenate(slopes)
    if not len(every):
        return None
    return weighted_quantiles(every, np.concatenate(sizes), (0.5,))[0]


def median_of_passes(values: Floats) -> Estimate:
    """Compute the median of few samples, and an interval between two of them.

    By a sign test: of 9 samples, the second and the eighth, so that one spoilt pass
    does not widen the interval. With 5 samples or fewer the interval is from least to
    most.
    """
    ordered = np.sort(values)
    outside = _samples_outside(len(ordered))
    ends = float(ordered[outside]), float(ordered[-1 - outside])
    return Estimate(float(np.median(ordered)), ends)


def _samples_outside(samples: int) -> int:
    """Count the samples at each end that are not in the interval; 0 for few samples."""
    outside, chance = 0, 0.0
    while True:
        # Probability that at most `outside` samples are above the true median.
        chance += math.comb(samples, outside) / 2**samples
        if chance > TAIL:
            return max(outside - 1, 0)
        outside += 1


class SessionDraws:
    """Draws of sessions: `counts` of each in each replicate, (replicates, s)."""

    def __init__(self, sessions: pl.Series, seed: int = SEED) -> None:
        names = sorted(set(sessions.drop_nulls().to_list()))
        self._index = {name: index for index, name in enumerate(names)}
        self.counts: Floats = np.zeros((REPLICATES, 0))
        if names:
            share = np.full(len(names), 1 / len(names))
            drawn = np.random.default_rng(seed).multinomial
            self.counts = drawn(len(names), share, size=REPLICATES).astype(float)

    def index_of(self, sessions: pl.Series) -> Ints:
        return sessions.replace_strict(self._index, return_dtype=pl.Int64).to_numpy()

    def quantiles(
        self, values: pl.Series, sessions: pl.Series
    ) -> dict[str, Distribution | None]:
        """p50, p90, p99 of `values` (n,) that are not null, with draws.

        None for a quantile that has too few requests. With fewer than MIN_SESSIONS
        sessions the draws are NaN: a value without an interval.
        """
        known = values.is_not_null()
        numbers = values.filter(known).to_numpy().astype(float)
        owners = self.index_of(sessions.filter(known))
        wanted = {k: q for k, q in QUANTILES.items() if len(numbers) >= MIN_REQUESTS[k]}
        by_quantile: dict[str, Distribution | None] = dict.fromkeys(QUANTILES)
        if not wanted:
            return by_quantile
        points = tuple(wanted.values())
        levels = weighted_quantiles(numbers, np.ones(len(numbers)), points)
        draws: Floats = np.full((REPLICATES, len(points)), np.nan)
        if len(np.unique(owners)) >= MIN_SESSIONS:
            draws = self._draws(numbers, owners, points, levels)
        for column, (name, level) in enumerate(zip(wanted, levels, strict=True)):
            by_quantile[name] = Distribution(level, draws[:, column])
        return by_quantile

    def _draws(
        self,
        numbers: Floats,
        owners: Ints,
        points: tuple[float, ...],
        levels: list[float],
    ) -> Floats:
        """(replicates, points); where none of the sessions was drawn, the level."""
        order = np.argsort(numbers)
        numbers, owners = numbers[order], owners[order]
        rows = max(CHUNK // len(numbers), 1)
        parts = []
        for start in range(0, REPLICATES, rows):
            total = np.cumsum(self.counts[start : start + rows, owners], axis=1)
            part = np.tile(np.asarray(levels, float), (len(total), 1))
            for row, sums in enumerate(total):
                if sums[-1] > 0:
                    at = np.searchsorted(sums, np.asarray(points) * sums[-1] - 1e-9)
                    part[row] = numbers[np.minimum(at, len(numbers) - 1)]
            parts.append(part)
        return np.concatenate(parts)


def latency_columns(output_tokens: str) -> list[pl.Expr]:
    """Compute all latencies in ms; null where a moment is missing.

    The frame has the moments of an `RequestOutcome`, and the column `output_tokens`.
    """
    return [
        _ms("intended_ns", "first_token_ns").alias("ttft_ms"),
        _ms("sent_ns", "first_token_ns").alias("ttft_sent_ms"),
        tpot(_ms("first_token_ns", "end_ns"), pl.col(output_tokens)).alias("tpot_ms"),
        _ms("intended_ns", "end_ns").alias("e2e_ms"),
        _ms("sent_ns", "end_ns").alias("e2e_sent_ms"),
    ]


def tpot(decode: pl.Expr, output_tokens: pl.Expr) -> pl.Expr:
    """Divide the time from first to last token by the tokens after the first."""
    further = output_tokens - 1
    return pl.when(further > 0).then(decode / further)


def tpot_of(first_token: float, end: float, output_tokens: int) -> float | None:
    """Compute the TPOT of one request, in the unit of its moments."""
    further = output_tokens - 1
    return (end - first_token) / further if further > 0 else None


def _ms(start: str, end: str) -> pl.Expr:
    return (pl.col(end) - pl.col(start)) / 1e6
