# SPDX-License-Identifier: Apache-2.0
"""Each arm against the baseline, and the A/A pair: by how much equal arms differ.

Differences are of quantiles over the same requests, in percent of the baseline's, with
sessions drawn alike in both arms. Whether two arms may be compared at all is for
fleet.analyze.refusals to say. The arms of an A/A pair are the same thing run twice:
they differ by noise alone, and a difference within its reach means nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fleet.analyze.frames import TITLES
from fleet.analyze.records import ArmRun
from fleet.analyze.refusals import refusals
from fleet.analyze.sessions import SessionDraws
from lab.stats.estimate import Estimate
from lab.stats.interval import stated

# Fewer steady requests in common than this are too few to leave the others out.
MIN_COMMON = 50


def percent_differences(
    requests: pl.DataFrame, baseline: str, arm: str, draws: SessionDraws
) -> dict[str, Any]:
    """{metric: {quantile: {value, ci95} in % or None}} of `arm` against `baseline`.

    `requests` ended ok (same_requests).
    """
    found: dict[str, Any] = {}
    for metric in TITLES:
        ours = levels_of(requests, arm, metric, draws)
        theirs = levels_of(requests, baseline, metric, draws)
        found[metric] = {
            quantile: stated(_percent(ours[quantile], theirs[quantile]), 3)
            for quantile in ours
        }
    return found


def levels_of(
    requests: pl.DataFrame, arm: str, metric: str, draws: SessionDraws
) -> dict[str, Estimate | None]:
    """Quantiles of one arm's requests."""
    own = requests.filter(pl.col("arm") == arm)
    return draws.quantiles(own[metric], own["session"])


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
) -> list[dict[str, Any]]:
    """Every arm against its baseline.

    An entry: {arm, baseline, same, refused, window, n, percent, verdicts}. `same`: the
    arm repeats the baseline (the A/A pair). `refused`: why the two must not be
    compared; then the rest is None. `n`: requests compared, each in every repeat of
    both arms.
    """
    arms = {run.info.arm: run.info for run in runs}
    first = runs[0].info.arm
    found = []
    for arm, info in arms.items():
        baseline = info.baseline or first
        if arm == baseline:
            continue
        entry = {"arm": arm, "baseline": baseline, "same": info.same_as == baseline}
        entry |= {"refused": refusals(runs, arm, baseline)}
        entry |= dict.fromkeys(("window", "n", "percent", "verdicts"))
        if not entry["refused"]:
            pair = requests.filter(pl.col("arm").is_in([arm, baseline]))
            window, kept = same_requests(pair)
            entry["window"], entry["n"] = window, kept["id"].n_unique()
            entry["percent"] = percent_differences(kept, baseline, arm, draws)
        found.append(entry)
    for entry in found:
        if not entry["refused"]:
            entry["verdicts"] = verdicts(entry, found)
    return found


def verdicts(entry: dict[str, Any], compared: list[dict[str, Any]]) -> dict[str, Any]:
    """{metric: {quantile: what may be said}} of a comparison that was not refused.

    Lower or higher only where the interval excludes 0 and, if the baseline has an A/A
    pair in `compared`, the difference is beyond what that pair's interval reaches.
    """
    pairs = [
        one["percent"]
        for one in compared
        if one["same"] and one["baseline"] == entry["baseline"] and one["percent"]
    ]
    return {
        metric: {
            quantile: _verdict(level, [pair[metric][quantile] for pair in pairs])
            for quantile, level in levels.items()
        }
        for metric, levels in entry["percent"].items()
    }


def _verdict(level: dict | None, noise: list[dict | None]) -> str:
    if level is None or level["ci95"] is None:
        return "undecided"
    low, high = level["ci95"]
    if low <= 0 <= high:
        return "not shown to differ"
    reach = [max(map(abs, one["ci95"])) for one in noise if one and one["ci95"]]
    if abs(level["value"]) <= max(reach, default=0):
        return "within the noise floor"
    word = "lower" if high < 0 else "higher"
    return word if reach else f"{word} (noise floor unknown)"


def same_requests(arms: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """("steady" or "all", the requests to compare out of those of two or more `arms`).

    Those that ended ok in every repeat of every arm, and were in the steady window
    there: each arm has a window of its own, and a slow arm's holds other turns. Where
    these are fewer than MIN_COMMON, those of any window.
    """
    runs = arms.select("arm", "repeat").n_unique()
    ok = arms.filter(pl.col("status") == "ok")
    steady = _in_all(ok.filter(pl.col("window") == "steady"), runs)
    if steady["id"].n_unique() >= MIN_COMMON:
        return "steady", steady
    return "all", _in_all(ok, runs)


def _in_all(requests: pl.DataFrame, runs: int) -> pl.DataFrame:
    """The requests whose id is there in all of the `runs`."""
    seen = pl.struct("arm", "repeat").n_unique().over("id")
    return requests.filter(seen == runs)
