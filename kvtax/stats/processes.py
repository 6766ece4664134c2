# SPDX-License-Identifier: Apache-2.0
"""Estimates from servers and runs: looks at a run that goes on, and runs of one arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import SEED, Distribution, Floats, t_quantile

# np.quantile finds each multiple of 1/2,000 among so many draws without interpolating.
DRAWS = 2_001
# With fewer, the far tails of Student's t would make intervals differ by chance.
RUN_DRAWS = 20_000
# Share of the differences between equal arms that lies within their reach.
REACH = 0.95
# Pocock (1977), constants for 1, 2, ... looks: Jennison and Turnbull (2000), table 2.1.
POCOCK = (1.960, 2.178, 2.289, 2.361, 2.413, 2.453, 2.485, 2.512, 2.535, 2.555)


def student(
    value: float, error: float, df: int, seed: int, level: float = 0.95
) -> Distribution:
    """Return a value whose error is Student's t: its draws are the quantiles, shuffled.

    Its 95 % interval is made as wide as one that holds in `level` of runs. Estimates
    that are subtracted or divided need different seeds: equal ones pair large draws
    with large ones.
    """
    levels = np.linspace(0, 1, DRAWS).clip(1 / (4 * DRAWS), 1 - 1 / (4 * DRAWS))
    wider = float(t_quantile((1 + level) / 2, df) / t_quantile(0.975, df))
    draws = value + wider * error * t_quantile(levels, df)
    return Distribution(value, np.random.default_rng(seed).permutation(draws))


def look_level(looks: int) -> float:
    """Compute the level of each interval so that in 95 % of runs no look is wrong.

    For a run that goes on, looks again, and may stop after any look (Pocock 1977).
    Raises ValueError for fewer than 1 or more than 10 looks.
    """
    if not 1 <= looks <= len(POCOCK):
        raise ValueError(f"{looks} looks: 1 to {len(POCOCK)} are possible")
    return 2 * NormalDist().cdf(POCOCK[looks - 1]) - 1


@dataclass(frozen=True)
class RunSpread:
    """Standard deviation of the log of a level between runs of one arm."""

    log_sd: float
    degrees: int

    @classmethod
    def of(cls, groups: Iterable[Floats]) -> RunSpread | None:
        """Pool the logs of the runs' levels (runs,), one array for each group of runs.

        None where no group has two runs, or a level is 0 or missing.
        """
        several = [logs for logs in groups if len(logs) > 1]
        degrees = sum(len(logs) - 1 for logs in several)
        if not degrees or not all(np.isfinite(logs).all() for logs in several):
            return None
        squares = sum(((logs - logs.mean()) ** 2).sum() for logs in several)
        return cls(float(np.sqrt(squares / degrees)), degrees)

    def offsets(self, arm: str, runs: int) -> Floats:
        """Draw offsets of the log of an arm's mean over `runs`: (RUN_DRAWS,)."""
        return self.log_sd / float(np.sqrt(runs)) * _offsets(arm, self.degrees)

    def reach(self, runs: int, other_runs: int, level: float = REACH) -> float:
        """Compute how far apart, in the log, two equal arms of so many runs may lie."""
        error = self.log_sd * float(np.sqrt(1 / runs + 1 / other_runs))
        return self.reach_of(error, level)

    def reach_of(self, error: float, level: float = REACH) -> float:
        """Return half the width of an interval that holds in `level` of runs."""
        return error * float(t_quantile((1 + level) / 2, self.degrees))


@cache
def _offsets(arm: str, degrees: int) -> Floats:
    """Draw offsets of one run of `arm`, where the standard deviation is about 1."""
    # The width is drawn alike for all arms: they share it.
    width = np.random.default_rng(SEED).chisquare(degrees, RUN_DRAWS)
    normal = np.random.default_rng([SEED, *arm.encode()]).normal(size=RUN_DRAWS)
    offsets: Floats = np.sqrt(degrees / width) * normal
    return offsets


def mean_over_servers(values: Sequence[float]) -> Estimate:
    """Compute the mean with Student's interval; without one for a single value."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean)
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    reach = float(t_quantile(0.975, len(values) - 1)) * error
    return Estimate(mean, (mean - reach, mean + reach))
