# SPDX-License-Identifier: Apache-2.0
"""How much two runs of the same arm differ, and what that adds to an interval.

Drawing sessions shows how much a result depends on the sessions that were replayed. It
does not show that a fleet started anew serves the same sessions faster or slower. So
the draws of an arm's level are also multiplied by a drawn offset of its runs.

Offsets are taken as normal in the logarithm. Two or three runs of one arm tell little
about their width. So it is pooled over all arms at one concurrency, where equal arms
(an A/A pair) are one arm with more runs, and it is drawn, too: the offsets follow
Student's t (Gelman et al. 2013, Bayesian Data Analysis, 3.2). An arm whose own runs
differ by more has its own width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import polars as pl

from fleet.analyze.common import same_requests
from fleet.analyze.frames import TITLES
from fleet.analyze.sessions import QUANTILES
from lab.stats.estimate import SEED, Estimate, Floats
from lab.stats.quantiles import weighted_quantiles
from lab.stats.t_and_f import t_quantile

# With fewer, the far tails of Student's t would make intervals differ by chance.
DRAWS = 20_000
# Of the differences between equal arms, this share lies within their reach.
REACH = 0.95


class Alike(NamedTuple):
    """Which arms are the same thing: equal `of` at one `concurrency`."""

    concurrency: int | None
    of: str


@dataclass(frozen=True)
class RunSpread:
    """Standard deviation of the log of a level between runs of one arm."""

    log_sd: float
    degrees: int

    @classmethod
    def of(cls, groups: Iterable[Floats]) -> RunSpread | None:
        """From the logs of the runs' levels (runs,), one array for each group of runs.

        None where no group has two runs, or a level is 0 or missing.
        """
        several = [logs for logs in groups if len(logs) > 1]
        degrees = sum(len(logs) - 1 for logs in several)
        if not degrees or not all(np.isfinite(logs).all() for logs in several):
            return None
        squares = sum(((logs - logs.mean()) ** 2).sum() for logs in several)
        return cls(float(np.sqrt(squares / degrees)), degrees)

    def offsets(self, arm: str, runs: int) -> Floats:
        """Drawn offset of the log of an arm's level, the mean of `runs`: (DRAWS,)."""
        return self.log_sd / np.sqrt(runs) * _offsets(arm, self.degrees)

    def reach(self, runs: int, other_runs: int) -> float:
        """How far apart, in the log, two equal arms of so many runs may lie."""
        error = self.log_sd * float(np.sqrt(1 / runs + 1 / other_runs))
        return error * float(t_quantile((1 + REACH) / 2, self.degrees))


@cache
def _offsets(arm: str, degrees: int) -> Floats:
    """Drawn offsets of one run of `arm`, where the standard deviation is about 1."""
    # The width is drawn alike for all arms: they share it.
    width = np.random.default_rng(SEED).chisquare(degrees, DRAWS)
    normal = np.random.default_rng([SEED, *arm.encode()]).normal(size=DRAWS)
    return np.sqrt(degrees / width) * normal


class Spreads:
    """The spread between runs, for every metric and quantile, at each concurrency."""

    def __init__(self, requests: pl.DataFrame, alike: dict[str, Alike]) -> None:
        """`requests` of the arms that may be compared; `alike` has all of them."""
        own = requests.filter(pl.col("arm").is_in(list(alike)))
        self.runs = {
            arm: of["repeat"].n_unique()
            for (arm,), of in own.partition_by("arm", as_dict=True).items()
        }
        groups: dict[Alike, list[str]] = {}
        for arm in self.runs:
            groups.setdefault(alike[arm], []).append(arm)
        logs = {
            group: _logs(own.filter(pl.col("arm").is_in(arms)))
            for group, arms in groups.items()
        }
        pairs = [logs[group] for group, arms in groups.items() if len(arms) > 1]
        self.pairs = len(pairs)
        self._of_pairs = _spread(pairs)
        at = {
            concurrency: _spread(
                [one for group, one in logs.items() if group.concurrency == concurrency]
            )
            for concurrency in {group.concurrency for group in groups}
        }
        self._of_arm = {
            arm: _wider(at[group.concurrency], _spread([logs[group]]))
            for group, arms in groups.items()
            for arm in arms
        }

    def widened(
        self, level: Estimate | None, arm: str, metric: str, quantile: str
    ) -> Estimate | None:
        """`level` with the runs drawn as well; without an interval where unknown."""
        if level is None:
            return None
        spread = self._of_arm[arm][metric, quantile]
        if spread is None:
            return Estimate(level.value, np.full(DRAWS, np.nan))
        sessions = np.resize(level.draws, DRAWS)
        offsets = spread.offsets(arm, self.runs[arm])
        return Estimate(level.value, sessions * np.exp(offsets))

    def reach_percent(
        self, arm: str, baseline: str, metric: str, quantile: str
    ) -> list[float] | None:
        """[low, high] in %: two equal arms of so many runs differ by no more.

        By the runs of all A/A pairs, whatever their concurrency. None without a pair.
        """
        spread = self._of_pairs[metric, quantile]
        runs = [self.runs.get(one, 0) for one in (arm, baseline)]
        if spread is None or not all(runs):
            return None
        reach = spread.reach(*runs)
        return [round(100 * float(np.expm1(edge)), 3) for edge in (-reach, reach)]


def _logs(requests: pl.DataFrame) -> dict[tuple[str, str], Floats]:
    """Log of each level in each run, of the requests that all these runs share."""
    _, kept = same_requests(requests)
    runs = kept.partition_by("arm", "repeat")
    found = {}
    for metric in TITLES:
        levels = np.array([_levels(run[metric].drop_nulls()) for run in runs])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(levels.reshape(len(runs), len(QUANTILES)))
        for column, quantile in enumerate(QUANTILES):
            found[metric, quantile] = logs[:, column]
    return found


def _levels(values: pl.Series) -> list[float]:
    if values.is_empty():
        return [np.nan] * len(QUANTILES)
    numbers = values.to_numpy().astype(float)
    return weighted_quantiles(numbers, np.ones(len(numbers)), tuple(QUANTILES.values()))


def _spread(
    groups: list[dict[tuple[str, str], Floats]],
) -> dict[tuple[str, str], RunSpread | None]:
    return {
        (metric, quantile): RunSpread.of(logs[metric, quantile] for logs in groups)
        for metric in TITLES
        for quantile in QUANTILES
    }


def _wider(
    pooled: dict[tuple[str, str], RunSpread | None],
    own: dict[tuple[str, str], RunSpread | None],
) -> dict[tuple[str, str], RunSpread | None]:
    """The pooled spread, but no narrower than an arm's own runs show."""
    return {
        key: replace(spread, log_sd=max(spread.log_sd, one.log_sd))
        if spread and (one := own[key])
        else spread
        for key, spread in pooled.items()
    }
