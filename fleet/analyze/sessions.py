# SPDX-License-Identifier: Apache-2.0
"""Quantiles with 95 % intervals by bootstrap over sessions.

Requests of one session share their prefix, their instance and their think times, so
the session is what is drawn with replacement, all its requests in all repeats with it
(cluster bootstrap: Davison and Hinkley 1997, 3.8). Every arm is drawn with the same
sessions, so a difference between two arms is paired. How much one run differs from the
next is not in these draws: fleet.analyze.runs adds it.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from lab.stats.estimate import REPLICATES, SEED, Estimate, Floats, Ints
from lab.stats.quantiles import weighted_quantiles

# Fewer sessions than this give no interval worth stating.
MIN_SESSIONS = 8
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# A quantile with less than one request beyond it is the maximum under another name.
MIN_REQUESTS = {"p50": 1, "p90": 10, "p99": 100}
# Weights held at once: replicates x requests, 8 bytes each.
CHUNK = 4_000_000


class SessionDraws:
    """How often each session is drawn in each replicate: `counts` (replicates, s)."""

    def __init__(self, sessions: pl.Series, seed: int = SEED) -> None:
        names = sorted(set(sessions.drop_nulls().to_list()))
        self._index = {name: index for index, name in enumerate(names)}
        self.counts = np.zeros((REPLICATES, 0))
        if names:
            share = np.full(len(names), 1 / len(names))
            drawn = np.random.default_rng(seed).multinomial
            self.counts = drawn(len(names), share, size=REPLICATES).astype(float)

    def index_of(self, sessions: pl.Series) -> Ints:
        return sessions.replace_strict(self._index, return_dtype=pl.Int64).to_numpy()

    def quantiles(
        self, values: pl.Series, sessions: pl.Series
    ) -> dict[str, Estimate | None]:
        """p50, p90, p99 of `values` (n,) that are not null, with draws.

        None for a quantile that has too few requests. With fewer than MIN_SESSIONS
        sessions the draws are NaN: a value without an interval.
        """
        known = values.is_not_null()
        numbers = values.filter(known).to_numpy().astype(float)
        owners = self.index_of(sessions.filter(known))
        wanted = {k: q for k, q in QUANTILES.items() if len(numbers) >= MIN_REQUESTS[k]}
        found: dict[str, Estimate | None] = dict.fromkeys(QUANTILES)
        if not wanted:
            return found
        points = tuple(wanted.values())
        levels = weighted_quantiles(numbers, np.ones(len(numbers)), points)
        draws = np.full((REPLICATES, len(points)), np.nan)
        if len(np.unique(owners)) >= MIN_SESSIONS:
            draws = self._draws(numbers, owners, points, levels)
        for column, (name, level) in enumerate(zip(wanted, levels, strict=True)):
            found[name] = Estimate(level, draws[:, column])
        return found

    def _draws(
        self, numbers: Floats, owners: Ints, points: tuple[float, ...], levels: list
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
