# SPDX-License-Identifier: Apache-2.0
"""Each arm against the baseline, and the A/A pair: by how much equal arms differ.

Differences are of quantiles over the same requests, in percent of the baseline's.
Their intervals draw sessions, alike in both arms, and runs (fleet.analyze.runs).
Whether two arms may be compared at all is for fleet.analyze.refusals to say. The arms
of an A/A pair are the same thing run twice: they differ by noise alone, and an interval
that begins within their reach means nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fleet.analyze.common import same_requests
from fleet.analyze.frames import TITLES
from fleet.analyze.paired import paired
from fleet.analyze.records import ArmRun
from fleet.analyze.refusals import refusals
from fleet.analyze.runs import Alike, Spreads
from fleet.analyze.sessions import QUANTILES, SessionDraws
from lab.stats.estimate import Estimate
from lab.stats.interval import stated

# What an entry of arms that must not be compared lacks.
REFUSED = ("window", "n", "percent", "reach", "verdicts", "paired")
# Equal arms in virtual time are equal to the byte.
NO_REACH = {metric: {q: [0.0, 0.0] for q in QUANTILES} for metric in TITLES}


def percent_differences(
    requests: pl.DataFrame,
    baseline: str,
    arm: str,
    draws: SessionDraws,
    spreads: Spreads,
) -> dict[str, Any]:
    """{metric: {quantile: {value, ci95} in % or None}} of `arm` against `baseline`.

    `requests` ended ok (same_requests).
    """
    found: dict[str, Any] = {}
    for metric in TITLES:
        ours = levels_of(requests, arm, metric, draws, spreads)
        theirs = levels_of(requests, baseline, metric, draws, spreads)
        found[metric] = {
            quantile: stated(_percent(ours[quantile], theirs[quantile]), 3)
            for quantile in ours
        }
    return found


def levels_of(
    requests: pl.DataFrame,
    arm: str,
    metric: str,
    draws: SessionDraws,
    spreads: Spreads,
) -> dict[str, Estimate | None]:
    """Quantiles of one arm's requests, with sessions and runs drawn."""
    own = requests.filter(pl.col("arm") == arm)
    levels = draws.quantiles(own[metric], own["session"])
    return {
        quantile: spreads.widened(level, arm, metric, quantile)
        for quantile, level in levels.items()
    }


def _percent(ours: Estimate | None, theirs: Estimate | None) -> Estimate | None:
    if ours is None or theirs is None or theirs.value <= 0:
        return None
    draws = np.full(len(theirs.draws), np.nan)
    # A share of a baseline that is 0 in some replicates has no interval.
    if theirs.draws.min() > 0:
        # Drawn with the same sessions: the replicates belong together.
        draws = 100 * (ours.draws / theirs.draws - 1)
    return Estimate(100 * (ours.value / theirs.value - 1), draws)


def comparisons(
    runs: list[ArmRun], requests: pl.DataFrame, draws: SessionDraws
) -> tuple[list[dict[str, Any]], Spreads]:
    """Every arm against its baseline, and the spread between the runs of these arms.

    An entry: {arm, baseline, same, refused, window, n, percent, reach, verdicts,
    paired}.
    `same`: the arm repeats the baseline (an A/A pair). `refused`: why the two must not
    be compared; then the rest is None. `n`: requests compared, each in every repeat of
    both arms. `reach`: {metric: {quantile: [low, high] in % or None}}, what two equal
    arms may differ by: nothing in virtual time, where `paired` compares them request by
    request.
    """
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
    spreads, found = Spreads(requests, alike), []
    for arm, reasons in refused.items():
        baseline = baselines[arm]
        same = arms[arm].same_as == baseline
        entry: dict[str, Any] = {"arm": arm, "baseline": baseline, "same": same}
        entry |= {"refused": reasons}
        entry |= dict.fromkeys(REFUSED)
        if not reasons:
            pair = requests.filter(pl.col("arm").is_in([arm, baseline]))
            window, kept = same_requests(pair)
            entry["window"], entry["n"] = window, kept["id"].n_unique()
            percent = percent_differences(kept, baseline, arm, draws, spreads)
            entry["percent"] = percent
            if arms[arm].virtual:
                entry["reach"] = NO_REACH
                entry["paired"] = paired(pair, arm, baseline)
            else:
                entry["reach"] = _reaches(spreads, arm, baseline)
            entry["verdicts"] = verdicts(percent, entry["reach"])
        found.append(entry)
    return found, spreads


def _reaches(spreads: Spreads, arm: str, baseline: str) -> dict[str, Any]:
    return {
        metric: {
            quantile: spreads.reach_percent(arm, baseline, metric, quantile)
            for quantile in QUANTILES
        }
        for metric in TITLES
    }


def verdicts(percent: dict[str, Any], reach: dict[str, Any]) -> dict[str, Any]:
    """{metric: {quantile: what may be said}} of a comparison that was not refused."""
    return {
        metric: {
            quantile: verdict(level, reach[metric][quantile])
            for quantile, level in levels.items()
        }
        for metric, levels in percent.items()
    }


def verdict(level: dict[str, Any] | None, reach: list[float] | None) -> str:
    """Lower or higher only where the whole interval lies beyond what equal arms reach.

    `level` is {value, ci95} in %, `reach` [low, high] in %; None where there is none.
    """
    if level is None or level["ci95"] is None:
        return "undecided"
    low, high = level["ci95"]
    if low <= 0 <= high:
        return "not shown to differ"
    least, most = reach or (0, 0)
    if least <= high and low <= most:
        return "within the noise floor"
    word = "lower" if high < 0 else "higher"
    return word if reach else f"{word} (noise floor unknown)"
