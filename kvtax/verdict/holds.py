# SPDX-License-Identifier: Apache-2.0
"""Holds of a config: what each metric takes while |cache| stays at one level."""

from __future__ import annotations

import polars as pl

from kvtax.records.requests import Phase
from kvtax.stats.held import Holds
from kvtax.stats.least_squares import regression_slope
from kvtax.verdict.metrics import SLOWNESS, Metric
from kvtax.verdict.speed import CONTROL

PLACE = ("repeat", "cycle", "level")
MODEL = "model_us"
# What is cut off at the slow end: a cost in fewer steps is for the mean to see.
SLOWEST = 0.01
# The share of a server's holds in which the machine is quiet.
QUIET = 0.25


def held_steps(steps: pl.DataFrame, decoders: int) -> pl.DataFrame:
    """Select the steps of holds in which all of their decoders run."""
    return steps.filter(pl.col("phase") == Phase.HOLD, pl.col("batch") >= decoders)


def places(held: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """Build a row per hold: place, |cache|, time in s, how slow the machine was.

    Two works in which no connector has a part say how slow, each as a multiple of the
    server's median: the thread that packs outputs (`slowness`), and what the engine's
    thread does besides scheduling and the connector's calls (`slowness_of_engine`). A
    third, how long the model takes besides the connector's calls, shows as well how
    late threads were woken. The slowest of the three, against the quiet holds of the
    server, is the hold's `disturbance`, at least 1. What the connector took is not in
    it, so it favours no level.
    """
    of_holds = held.group_by(PLACE).agg(
        pl.col("cache_blocks").mean(),
        (pl.col("t_ns").mean() / 1e9).alias("time_s"),
    )
    outputs = (
        threads.filter(
            pl.col("phase") == Phase.HOLD, pl.col("thread").str.contains(CONTROL)
        )
        .group_by(PLACE)
        .agg((pl.col("us").sum() / pl.col("steps").sum()).alias("slowness"))
    )
    rest = pl.col("thread_cpu_us") - pl.col("scheduler_cpu_us")
    model = pl.col("execute_model_us") - pl.col("worker_calls_us").fill_null(0)
    of_engine = (
        held.filter("decode_only")
        .group_by(PLACE)
        .agg(
            rest.median().alias("rest"),
            pl.col("worker_calls_us").median(),
            model.median().alias(MODEL),
        )
        .with_columns(
            (
                pl.col("rest")
                - _cpu_share(held) * pl.col("worker_calls_us").fill_null(0)
            ).alias("slowness_of_engine")
        )
        .drop("rest", "worker_calls_us")
    )
    table = of_holds.join(outputs, on=PLACE, how="left").join(
        of_engine, on=PLACE, how="left"
    )
    quiet = [
        _ratio(pl.col(name), pl.col(name).quantile(QUIET))
        for name in (*SLOWNESS, MODEL)
    ]
    return table.with_columns(
        *(_ratio(pl.col(name), pl.col(name).median()) for name in SLOWNESS),
        disturbance=pl.max_horizontal(quiet).clip(1.0),
    ).sort(PLACE)


def _ratio(work: pl.Expr, usual: pl.Expr) -> pl.Expr:
    """Divide a work by what is usual on its server; 1 where it is not known."""
    ratio = work / usual.over("repeat")
    known = pl.when(ratio > 0).then(ratio).otherwise(1.0)
    return known.fill_nan(1.0).fill_null(1.0)


def _cpu_share(held: pl.DataFrame) -> float:
    """Compute which share of the connector's time in the worker is CPU time.

    By regression over steps: the CPU time of the thread has a call that works, and not
    one that waits. The slowest tenth, where stalls are, is left out.
    """
    calls = pl.col("worker_calls_us")
    rest = (pl.col("thread_cpu_us") - pl.col("scheduler_cpu_us")).alias("rest")
    own = (
        held.filter("decode_only")
        .select(rest, calls)
        .drop_nulls()
        .filter(calls <= calls.quantile(0.9))
    )
    share = regression_slope(own, "worker_calls_us", "rest")
    return 1.0 if share is None else min(max(share, 0.0), 1.0)


def holds_of(
    held: pl.DataFrame, at: pl.DataFrame, metric: Metric, robust: bool = True
) -> Holds | None:
    """Compute what `metric` is in each hold; None where it was not measured.

    A median is one, and a mean leaves out the slowest hundredth, unless not `robust`:
    then it is the mean of all.
    """
    time = pl.col(metric.time)
    own = held.filter(time.is_finite())
    if metric.steps != "all":
        own = own.filter(metric.steps)
    if not robust:
        value = time.mean()
    elif metric.middle == "median":
        value = time.median()
    else:
        value = time.filter(time <= time.quantile(1 - SLOWEST, "higher")).mean()
    found = own.group_by(PLACE).agg(value.alias("us"), pl.len().alias("n"))
    rows = at.join(found.filter(pl.col("n") >= metric.least_steps), on=PLACE).sort(
        PLACE
    )
    if not rows.height:
        return None
    return Holds(
        server=rows["repeat"].cast(pl.Int64).to_numpy(),
        level=rows["level"].cast(pl.Int64).to_numpy(),
        x=rows["cache_blocks"].to_numpy() / 1_000,
        time_s=rows["time_s"].to_numpy(),
        slowness=rows.select(metric.controls).to_numpy(),
        disturbance=rows["disturbance"].to_numpy(),
        values=rows["us"].cast(pl.Float64).to_numpy(),
    )
