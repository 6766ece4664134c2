# SPDX-License-Identifier: Apache-2.0
"""Holds of a config: what each metric takes while |cache| stays at one level."""

from __future__ import annotations

import polars as pl

from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.stats.held import Holds
from kvtax.steps.trial_steps import PROCESSES
from kvtax.verdict.metrics import Metric

PLACE = ("repeat", "hold", "level")
# What is cut off at the slow end of a hold: stalls of the machine, and rare costs.
SLOWEST = 0.1


def held_steps(steps: pl.DataFrame, ladder: Ladder) -> pl.DataFrame:
    """Select the steps of holds in which all of their decoders run.

    `many` is whether those are the ladder's `many_decoders`.
    """
    # Older drivers did not name the requests of a hold.
    decoders = pl.col("decoders").replace(0, ladder.decoders)
    held = steps.filter(pl.col("phase") == Phase.HOLD, pl.col("batch") >= decoders)
    return held.with_columns((decoders > ladder.decoders).alias("many"))


def holds_of(held: pl.DataFrame, metric: Metric) -> Holds | None:
    """Compute what `metric` is in each hold; None where it was not measured.

    The mean without the slowest tenth of the hold's steps.
    """
    time = pl.col(metric.time)
    own = held.filter(time.is_finite(), pl.col("many") == metric.many)
    if metric.steps != "all":
        own = own.filter(metric.steps)
    usual = time.filter(time <= time.quantile(1 - SLOWEST, "higher")).mean()
    values = own.group_by(PLACE).agg(usual.alias("us"), pl.len().alias("n"))
    return _holds(held, values.filter(pl.col("n") >= metric.least_steps))


def holds_of_cpu(held: pl.DataFrame, cpu: pl.DataFrame, of: str) -> Holds | None:
    """Compute the CPU time per step in each hold of few decoders; None without any.

    `of` is PROCESSES, or THREADS for all else in `cpu`: nothing, if no thread was
    started.
    """
    own = (pl.col("of") == PROCESSES) == (of == PROCESSES)
    us = pl.col("us_per_step").filter(own).sum().alias("us")
    return _holds(held.filter(~pl.col("many")), cpu.group_by(PLACE).agg(us))


def _holds(held: pl.DataFrame, values: pl.DataFrame) -> Holds | None:
    """Join values by hold with where and when the hold was."""
    places = held.group_by(PLACE).agg(
        pl.col("cache_blocks", "age_s").mean(),
        (pl.col("t_ns").mean() / 1e9).alias("time_s"),
    )
    rows = places.join(values, on=PLACE).sort(PLACE)
    if not rows.height:
        return None
    return Holds(
        server=rows["repeat"].cast(pl.Int64).to_numpy(),
        level=rows["level"].cast(pl.Int64).to_numpy(),
        x=rows["cache_blocks"].to_numpy() / 1_000,
        time_s=rows["time_s"].to_numpy(),
        age_s=rows["age_s"].to_numpy(),
        values=rows["us"].cast(pl.Float64).to_numpy(),
    )
