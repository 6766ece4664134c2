# SPDX-License-Identifier: Apache-2.0
"""Interference: does TPOT rise with the prefill under way at the same instance?

For each request that ended ok, x is the mean over its decode (first token to end) of
the new tokens then waiting for their first token at its instance, in thousands, and y
its TPOT in ms. The slope is least squares in each arm; its interval draws sessions. x
is a mean over time and not a sum, so that a slow decode does not see more by lasting.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import Distribution
from kvtax.stats.least_squares import line_of_sums
from kvtax.stats.quantiles import MIN_SESSIONS, SessionDraws

from kvtax_fleet.analyze.load import pending_prefill, step_function

MIN_REQUESTS = 30
POINTS = {"session": pl.String, "tpot_ms": pl.Float64, "prefill_ktokens": pl.Float64}


class Interference(msgspec.Struct):
    """Line of TPOT over the prefill under way at the same instance."""

    slope_ms_per_ktoken: Estimate
    """TPOT added per 1,000 tokens of prefill."""
    base_ms: float
    """TPOT without any prefill."""
    n: int
    """Requests."""


def points(requests: pl.DataFrame, instances: list[str]) -> pl.DataFrame:
    """(session, prefill_ktokens, tpot_ms) of one arm and repeat."""
    steps = step_function(pending_prefill(requests), instances)
    decoded = requests.filter(
        pl.col("tpot_ms").is_not_null() & (pl.col("end_ns") > pl.col("first_token_ns"))
    )
    frames = []
    if steps is None:
        return pl.DataFrame(schema=POINTS)
    for name in instances:
        own = decoded.filter(pl.col("instance") == name)
        mean = steps.mean_between(
            name, own["first_token_ns"].to_numpy(), own["end_ns"].to_numpy()
        )
        frames.append(
            own.select("session", "tpot_ms").with_columns(
                pl.Series("prefill_ktokens", np.maximum(mean, 0) / 1e3)
            )
        )
    return pl.concat(frames) if frames else pl.DataFrame(schema=POINTS)


def slope(points: pl.DataFrame, draws: SessionDraws) -> Interference | None:
    """Fit the line; None with too few requests, or if x is constant."""
    if points.height < MIN_REQUESTS:
        return None
    x = points["prefill_ktokens"].to_numpy()
    y = points["tpot_ms"].to_numpy()
    owner = draws.index_of(points["session"])
    sessions = draws.counts.shape[1]
    # Sums of each session are all that least squares needs of it.
    sums = np.stack(
        [
            np.bincount(owner, weights=term, minlength=sessions)
            for term in (np.ones_like(x), x, y, x * x, x * y)
        ]
    )
    value, base = line_of_sums(sums.sum(axis=1))
    if not np.isfinite(value):
        return None
    drawn, _ = line_of_sums(sums @ draws.counts.T)
    if len(np.unique(owner)) < MIN_SESSIONS:
        drawn = np.full_like(drawn, np.nan)
    else:
        drawn = np.where(np.isfinite(drawn), drawn, value)
    return Interference(
        slope_ms_per_ktoken=Estimate.of(Distribution(float(value), drawn), 5),
        base_ms=round(float(base), 4),
        n=points.height,
    )
