# SPDX-License-Identifier: Apache-2.0
"""Compare each arm with the baseline; measure how much equal arms differ (A/A pairs).

Differences are of quantiles over the same requests, in percent of the baseline's.
kvtax_fleet.analyze.refusals decides whether two arms may be compared. The arms of an
A/A pair are the same thing run twice: they differ by noise alone, and an interval that
begins within their reach means nothing.

Runs: drawing sessions shows how much a result depends on the sessions that were
replayed, not whether a fleet started anew serves the same sessions faster or slower. So
the draws of an arm's level are also multiplied by a drawn offset of its runs, normal in
the logarithm. Two or three runs of one arm show little of its width. So the width is
pooled over all arms at one concurrency, where equal arms (an A/A pair) are one arm with
more runs, and it is drawn, too: the offsets follow Student's t (Gelman et al. 2013,
Bayesian Data Analysis, 3.2). An arm whose own runs differ by more has its own width.

Virtual time: in one repeat all arms get the same sessions in the same order, and no
machine is in the way. So a request is compared with itself: the arm alone makes the
difference (common random numbers: Law 2015, Simulation Modeling and Analysis, 11.2).
The interval draws sessions with replacement, alike in both arms. A repeat, which is an
order of the sessions, has an effect of its own. Drawing few repeats with replacement
shows too little of it: of two, half of the draws are one repeat twice. So repeats add
an error that is Student's t, with one degree of freedom less than there are repeats.
Noise of single requests is in both parts, so the interval is rather too wide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import REPLICATES, SEED, Distribution, Floats
from kvtax.stats.processes import RUN_DRAWS, RunSpread, student
from kvtax.stats.quantiles import (
    MIN_SESSIONS,
    QUANTILES,
    SessionDraws,
    weighted_quantiles,
)

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.frames import (
    MIN_COMMON,
    TITLES,
    Levels,
    estimates,
    same_requests,
)
from kvtax_fleet.analyze.refusals import refusals

# The verdict as analysis.json has it; reports say "no significant difference".
NO_DIFFERENCE = "not shown to differ"
# [low, high] in % by metric and quantile.
Reaches = dict[str, dict[str, list[float] | None]]
# Equal arms in virtual time are equal to the byte.
NO_REACH: Reaches = {metric: {q: [0.0, 0.0] for q in QUANTILES} for metric in TITLES}


class Paired(msgspec.Struct):
    """Request by request, over the `n` requests that ended ok in both arms."""

    n: int
    """Requests that ended ok in both arms."""
    percent: Estimate
    """Difference of the means, in % of the baseline's."""
    faster: Estimate
    """Requests in which the arm is faster, in %."""


class Comparison(msgspec.Struct):
    """An arm against its baseline. Of a refused comparison the rest is null."""

    arm: str
    """The arm."""
    baseline: str
    """What it is compared with."""
    same: bool
    """Whether the arm repeats the baseline (an A/A pair)."""
    refused: list[str]
    """Reasons why the two must not be compared."""
    window: str | None = None
    """Window of the requests, as in `latency`."""
    n: int | None = None
    """Requests compared, each in every repeat of both arms."""
    percent: dict[str, Levels] | None = None
    """Differences by metric and quantile, in %."""
    reach: Reaches | None = None
    """[low, high] in %: what equal arms may differ by; nothing in virtual time."""
    verdicts: dict[str, dict[str, str]] | None = None
    """By metric and quantile: `lower`, `higher`, `within the noise floor`, `not shown
    to differ` or `undecided`."""
    paired: dict[str, Paired | None] | None = None
    """In virtual time, by metric."""

    def difference(self, metric: str, quantile: str) -> Estimate | None:
        """Return the difference in %; None if there is none."""
        return self.percent[metric][quantile] if self.percent else None

    def verdict(self, metric: str, quantile: str) -> str:
        """Return the verdict; empty if the comparison was refused."""
        return self.verdicts[metric][quantile] if self.verdicts else ""


def percent_differences(
    requests: pl.DataFrame,
    baseline: str,
    arm: str,
    draws: SessionDraws,
    spreads: Spreads,
) -> dict[str, Levels]:
    """Compute the differences of `arm` from `baseline` in %, by metric and quantile.

    `requests` ended ok (same_requests).
    """
    result: dict[str, Levels] = {}
    for metric in TITLES:
        ours = levels_of(requests, arm, metric, draws, spreads)
        theirs = levels_of(requests, baseline, metric, draws, spreads)
        percent = {at: _percent(ours[at], theirs[at]) for at in ours}
        result[metric] = estimates(percent, 3)
    return result


def levels_of(
    requests: pl.DataFrame,
    arm: str,
    metric: str,
    draws: SessionDraws,
    spreads: Spreads,
) -> dict[str, Distribution | None]:
    """Quantiles of one arm's requests, with sessions and runs drawn."""
    own = requests.filter(pl.col("arm") == arm)
    levels = draws.quantiles(own[metric], own["session"])
    return {
        quantile: spreads.widened(level, arm, metric, quantile)
        for quantile, level in levels.items()
    }


def _percent(
    ours: Distribution | None, theirs: Distribution | None
) -> Distribution | None:
    if ours is None or theirs is None or theirs.value <= 0:
        return None
    draws: Floats = np.full(len(theirs.draws), np.nan)
    # A share of a baseline that is 0 in some replicates has no interval.
    if theirs.draws.min() > 0:
        # Drawn with the same sessions: the replicates belong together.
        draws = 100 * (ours.draws / theirs.draws - 1)
    return Distribution(100 * (ours.value / theirs.value - 1), draws)


def comparisons(
    runs: list[ArmRun], requests: pl.DataFrame, draws: SessionDraws
) -> list[Comparison]:
    """Compare every arm with its baseline."""
    arms = {run.info.arm: run.info for run in runs}
    first = runs[0].info.arm
    baselines = {arm: info.baseline or first for arm, info in arms.items()}
    refused = {
        arm: refusals(runs, arm, baseline)
        for arm, baseline in baselines.items()
        if arm != baseline
    }
    alike = {
        arm: Alike(info.concurrency, info.same_as or arm)
        for arm, info in arms.items()
        if not refused.get(arm)
    }
    spreads = Spreads(requests, alike)
    result = []
    for arm, reasons in refused.items():
        baseline, info = baselines[arm], arms[arm]
        entry = Comparison(arm, baseline, info.same_as == baseline, reasons)
        result.append(entry)
        if reasons:
            continue
        pair = requests.filter(pl.col("arm").is_in([arm, baseline]))
        entry.window, kept = same_requests(pair)
        entry.n = kept["id"].n_unique()
        entry.percent = percent_differences(kept, baseline, arm, draws, spreads)
        entry.reach = NO_REACH if info.virtual else _reaches(spreads, arm, baseline)
        entry.verdicts = verdicts(entry.percent, entry.reach)
        if info.virtual:
            entry.paired = paired(pair, arm, baseline)
    return result


def _reaches(spreads: Spreads, arm: str, baseline: str) -> Reaches:
    return {
        metric: {
            quantile: spreads.reach_percent(arm, baseline, metric, quantile)
            for quantile in QUANTILES
        }
        for metric in TITLES
    }


def verdicts(percent: dict[str, Levels], reach: Reaches) -> dict[str, dict[str, str]]:
    """Judge each metric and quantile of a comparison that was not refused."""
    return {
        metric: {
            quantile: verdict(level, reach[metric][quantile])
            for quantile, level in levels.items()
        }
        for metric, levels in percent.items()
    }


def verdict(level: Estimate | None, reach: list[float] | None) -> str:
    """Call it lower or higher only if the whole interval lies beyond the reach.

    Both are in %; without a reach the noise floor is unknown.
    """
    if level is None or level.ci95 is None:
        return "undecided"
    low, high = level.ci95
    if low <= 0 <= high:
        return NO_DIFFERENCE
    least, most = reach or (0, 0)
    if least <= high and low <= most:
        return "within the noise floor"
    word = "lower" if high < 0 else "higher"
    return word if reach else f"{word} (noise floor unknown)"


def paired(requests: pl.DataFrame, arm: str, baseline: str) -> dict[str, Paired | None]:
    """Compare `arm` with `baseline` request by request, by metric.

    The requests are those in the steady window of both, or in any where these are too
    few.
    """
    pairs = _pairs(requests.filter(pl.col("status") == "ok"), arm, baseline)
    steady = pairs.filter(
        pl.col("window") == "steady", pl.col("window_before") == "steady"
    )
    if steady.height >= MIN_COMMON:
        pairs = steady
    return {metric: _compared(pairs, metric) for metric in TITLES}


def paired_means(
    requests: pl.DataFrame, arm: str, baseline: str, metric: str
) -> Paired | None:
    """Compare `arm` with `baseline` by one metric, over all requests of both."""
    return _compared(_pairs(requests, arm, baseline), metric)


def _pairs(requests: pl.DataFrame, arm: str, baseline: str) -> pl.DataFrame:
    ours, theirs = (requests.filter(pl.col("arm") == each) for each in (arm, baseline))
    return ours.join(theirs, on=["id", "repeat"], suffix="_before")


def _compared(pairs: pl.DataFrame, metric: str) -> Paired | None:
    before = f"{metric}_before"
    known = pairs.drop_nulls([metric, before])
    if known.height == 0 or known[before].sum() == 0:
        return None
    faster = pl.col(metric) < pl.col(before)
    values = known.select(metric, before, faster=faster, n=pl.lit(1)).cast(pl.Float64)
    ours, theirs, faster, n = np.moveaxis(_sums(known, values.to_numpy()), -1, 0)
    ratio, share = ratio_of_sums(ours, theirs), ratio_of_sums(faster, n)
    percent = Distribution(100 * (ratio.value - 1), 100 * (ratio.draws - 1))
    share = Distribution(100 * share.value, 100 * share.draws.clip(max=1))
    return Paired(int(n.sum()), Estimate.of(percent, 3), Estimate.of(share, 2))


def _sums(known: pl.DataFrame, values: Floats) -> Floats:
    """Sum the values (n, v) by session and repeat: (sessions, repeats, v)."""
    sessions, repeats = (
        np.unique(known[name].to_numpy(), return_inverse=True)[1]
        for name in ("session", "repeat")
    )
    sums = np.zeros((sessions.max() + 1, repeats.max() + 1, values.shape[1]))
    np.add.at(sums, (sessions, repeats), values)
    return sums


def ratio_of_sums(over: Floats, under: Floats) -> Distribution:
    """Divide the sums of `over` and `under`, (sessions, repeats) each.

    The draws are NaN with too few sessions, or a single repeat.
    """
    sessions, repeats = over.shape
    value = float(over.sum() / under.sum())
    if sessions < MIN_SESSIONS or repeats < 2:
        return Distribution(value, np.full(REPLICATES, np.nan))
    share = np.full(sessions, 1 / sessions)
    drawn = np.random.default_rng(SEED).multinomial(sessions, share, size=REPLICATES)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_sessions = drawn @ over.sum(axis=1) / (drawn @ under.sum(axis=1))
    # How far each repeat is from the ratio, to first order; the mean is 0.
    apart = (over - value * under).sum(axis=0) / under.sum(axis=0).mean()
    error = float(apart.std(ddof=1)) / repeats**0.5
    of_repeats = student(0.0, error, repeats - 1, SEED).draws
    draws = np.resize(of_sessions, len(of_repeats)) + of_repeats
    # Nothing that is measured here can be below 0.
    return Distribution(value, draws.clip(min=0))


class Alike(NamedTuple):
    """Group the arms that are the same thing: equal `of` at one `concurrency`."""

    concurrency: int | None
    of: str


class Spreads:
    """The spread between runs, for every metric and quantile, at each concurrency."""

    def __init__(self, requests: pl.DataFrame, alike: dict[str, Alike]) -> None:
        """Pool the spreads of `requests`; `alike` has all arms that may be compared."""
        own = requests.filter(pl.col("arm").is_in(list(alike)))
        self.runs = {
            arm: of["repeat"].n_unique()
            for (arm,), of in own.partition_by("arm", as_dict=True).items()
        }
        groups: dict[Alike, list[str]] = {}
        for arm in self.runs:
            groups.setdefault(alike[arm], []).append(arm)
        logs = {
            group: _log_levels(own.filter(pl.col("arm").is_in(arms)))
            for group, arms in groups.items()
        }
        pairs = [logs[group] for group, arms in groups.items() if len(arms) > 1]
        self.pairs = len(pairs)
        self._of_pairs = _run_spreads(pairs)
        at = {
            concurrency: _run_spreads(
                [
                    each
                    for group, each in logs.items()
                    if group.concurrency == concurrency
                ]
            )
            for concurrency in {group.concurrency for group in groups}
        }
        self._of_arm = {
            arm: _wider(at[group.concurrency], _run_spreads([logs[group]]))
            for group, arms in groups.items()
            for arm in arms
        }

    def widened(
        self, level: Distribution | None, arm: str, metric: str, quantile: str
    ) -> Distribution | None:
        """`level` with the runs drawn as well; without an interval where unknown."""
        if level is None:
            return None
        spread = self._of_arm[arm][metric, quantile]
        if spread is None:
            return Distribution(level.value, np.full(RUN_DRAWS, np.nan))
        sessions = np.resize(level.draws, RUN_DRAWS)
        offsets = spread.offsets(arm, self.runs[arm])
        return Distribution(level.value, sessions * np.exp(offsets))

    def reach_percent(
        self, arm: str, baseline: str, metric: str, quantile: str
    ) -> list[float] | None:
        """[low, high] in %: two equal arms of so many runs differ by no more.

        By the runs of all A/A pairs, whatever their concurrency. None without a pair.
        """
        spread = self._of_pairs[metric, quantile]
        runs = [self.runs.get(each, 0) for each in (arm, baseline)]
        if spread is None or not all(runs):
            return None
        reach = spread.reach(*runs)
        return [round(100 * float(np.expm1(edge)), 3) for edge in (-reach, reach)]


def _log_levels(requests: pl.DataFrame) -> dict[tuple[str, str], Floats]:
    """Log of each level in each run, of the requests that all these runs share."""
    _, kept = same_requests(requests)
    runs = kept.partition_by("arm", "repeat")
    result = {}
    for metric in TITLES:
        levels = np.array([_run_levels(run[metric].drop_nulls()) for run in runs])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(levels.reshape(len(runs), len(QUANTILES)))
        for column, quantile in enumerate(QUANTILES):
            result[metric, quantile] = logs[:, column]
    return result


def _run_levels(values: pl.Series) -> list[float]:
    if values.is_empty():
        return [np.nan] * len(QUANTILES)
    numbers = values.to_numpy().astype(float)
    return weighted_quantiles(numbers, np.ones(len(numbers)), tuple(QUANTILES.values()))


def _run_spreads(
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
    """Widen the pooled spread to that of an arm's own runs."""
    return {
        key: replace(spread, log_sd=max(spread.log_sd, each.log_sd))
        if spread and (each := own[key])
        else spread
        for key, spread in pooled.items()
    }
