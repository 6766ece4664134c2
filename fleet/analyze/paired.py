# SPDX-License-Identifier: Apache-2.0
"""Arms in virtual time, request by request.

In one repeat all arms get the same sessions in the same order, and no machine is in the
way. So a request is compared with itself: what differs is the arm's doing. (Common
random numbers: Law 2015, Simulation Modeling and Analysis, 11.2.) The interval draws
sessions and repeats, each with replacement and alike in both arms (a pigeonhole
bootstrap: Owen 2007).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fleet.analyze.common import MIN_COMMON
from fleet.analyze.frames import TITLES
from fleet.analyze.sessions import MIN_SESSIONS
from lab.stats.estimate import REPLICATES, SEED, Estimate, Floats
from lab.stats.interval import stated


def paired(requests: pl.DataFrame, arm: str, baseline: str) -> dict[str, Any]:
    """{metric: {n, percent, faster} or None} of `arm` against `baseline`.

    `percent`: by how many % the mean is longer; `faster`: in how many % of the requests
    the arm is, both as {value, ci95}. Of the `n` requests that ended ok in both, in the
    steady window of both, or in any where these are too few.
    """
    pairs = _pairs(requests, arm, baseline)
    return {metric: _compared(pairs, metric) for metric in TITLES}


def _pairs(requests: pl.DataFrame, arm: str, baseline: str) -> pl.DataFrame:
    ok = requests.filter(pl.col("status") == "ok")
    ours, theirs = (ok.filter(pl.col("arm") == one) for one in (arm, baseline))
    pairs = ours.join(theirs, on=["id", "repeat"], suffix="_before")
    steady = pairs.filter(
        pl.col("window") == "steady", pl.col("window_before") == "steady"
    )
    return steady if steady.height >= MIN_COMMON else pairs


def _compared(pairs: pl.DataFrame, metric: str) -> dict[str, Any] | None:
    before = f"{metric}_before"
    known = pairs.drop_nulls([metric, before])
    if known.height == 0 or known[before].sum() == 0:
        return None
    faster = pl.col(metric) < pl.col(before)
    values = known.select(metric, before, faster=faster, n=pl.lit(1)).cast(pl.Float64)
    sums = _sums(known, values.to_numpy())
    drawn = _draws(sums)
    ours, theirs, faster, n = sums.sum(axis=(0, 1)).tolist()
    with np.errstate(invalid="ignore", divide="ignore"):
        percent = Estimate(100 * (ours / theirs - 1), 100 * (drawn[0] / drawn[1] - 1))
        share = Estimate(100 * faster / n, 100 * drawn[2] / drawn[3])
    return {"n": int(n), "percent": stated(percent, 3), "faster": stated(share, 2)}


def _sums(known: pl.DataFrame, values: Floats) -> Floats:
    """Of the values (n, v), by session and repeat: (sessions, repeats, v)."""
    sessions, repeats = (
        np.unique(known[name].to_numpy(), return_inverse=True)[1]
        for name in ("session", "repeat")
    )
    sums = np.zeros((sessions.max() + 1, repeats.max() + 1, values.shape[1]))
    np.add.at(sums, (sessions, repeats), values)
    return sums


def _draws(sums: Floats) -> Floats:
    """(values, REPLICATES); NaN with too few sessions, or a single repeat."""
    sessions, repeats, values = sums.shape
    if sessions < MIN_SESSIONS or repeats < 2:
        return np.full((values, REPLICATES), np.nan)
    rng = np.random.default_rng(SEED)
    of_sessions, of_repeats = (
        rng.multinomial(count, np.full(count, 1 / count), size=REPLICATES)
        for count in (sessions, repeats)
    )
    return np.einsum("ds,srv,dr->vd", of_sessions, sums, of_repeats)
