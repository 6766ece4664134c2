# SPDX-License-Identifier: Apache-2.0
"""Holds of a config: what each metric takes while |cache| stays at one level.

A value is the mean without the slowest tenth of the hold's steps.

A mean over steps cannot be known where a few of them take most of the time: stalls of
the machine do, too. But those come at every level alike. So long steps are counted; if
the counts rise with the level, more than by chance, the cost grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from kvtax.records.per_config import RareSteps
from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.stats.distribution import Floats
from kvtax.stats.held import Holds
from kvtax.stats.resampling import chance_of_rise
from kvtax.verdict.metrics import METRICS, OF_CPU, PROCESSES, THREADS, Metric

PLACE = ("repeat", "hold", "level")
# What is cut off at the slow end of a hold: stalls of the machine, and rare costs.
SLOWEST = 0.1
LONG_US = 1_000.0
CHANCE = 0.001
# The control: vLLM's own work in a step, and the model.
REST = "rest"
# All but the whole step, of which it is a part.
CONTROLLED = frozenset({*METRICS, *OF_CPU} - {"step"})
# Of numbers in a table of holds.
DIGITS = 3


def held_steps(steps: pl.DataFrame, ladder: Ladder) -> pl.DataFrame:
    """Select the steps of holds in which all of their decoders run.

    `many` is whether those are the ladder's `many_decoders`.
    """
    # Older drivers did not name the requests of a hold.
    decoders = pl.col("decoders").replace(0, ladder.decoders)
    held = steps.filter(pl.col("phase") == Phase.HOLD, pl.col("batch") >= decoders)
    return held.with_columns((decoders > ladder.decoders).alias("many"))


def holds_of(held: pl.DataFrame, metric: Metric) -> Holds | None:
    """Compute what `metric` is in each hold; None where it was not measured."""
    return as_holds(_places(held).join(_values(held, metric), on=PLACE), "us")


def holds_of_cpu(held: pl.DataFrame, cpu: pl.DataFrame) -> Holds | None:
    """Sum the CPU time per step of `cpu` in each hold; None without any."""
    us = cpu.group_by(PLACE).agg(pl.col("us_per_step").sum().alias("us"))
    return as_holds(_places(held).join(us, on=PLACE), "us")


def hold_table(held: pl.DataFrame, cpu: pl.DataFrame) -> pl.DataFrame:
    """Tabulate the holds: place, |cache|, age, time, and each metric in us per step.

    CPU times are of holds with few decoders: those of PROCESSES, and of all else in
    `cpu`, nothing if no thread was started.
    """
    table = _places(held)
    for name, metric in METRICS.items():
        table = table.join(_values(held, metric, name), on=PLACE, how="left")
    of_all, us = pl.col("of") == PROCESSES, pl.col("us_per_step")
    read = cpu.group_by(PLACE).agg(
        us.filter(~of_all).sum().alias(THREADS),
        us.filter(of_all).sum().alias(PROCESSES),
    )
    table = table.join(read, on=PLACE, how="left").with_columns(
        pl.when(~pl.col("many")).then(name).alias(name) for name in OF_CPU
    )
    table = table.join(_rest(held), on=PLACE, how="left")
    counts = long_steps(held)
    table = table.join(counts, on=PLACE, how="left").sort(PLACE)
    return table.with_columns(
        pl.col("many").cast(pl.Int64),
        pl.col(pl.Float32, pl.Float64).cast(pl.Float64).round(DIGITS),
    )


def as_table(columns: Mapping[str, Sequence[float | None]]) -> pl.DataFrame:
    """Read a table of holds from a file's columns."""
    table = pl.DataFrame(dict(columns), schema=dict.fromkeys(columns, pl.Float64))
    return table.cast(dict.fromkeys((*PLACE, "many", "steps", "long"), pl.Int64))


def as_holds(rows: pl.DataFrame, name: str) -> Holds | None:
    """Select the rows of a table of holds that have the metric; None without any."""
    rows = rows.filter(pl.col(name).is_not_null()).sort(PLACE)
    if not rows.height:
        return None
    return Holds(
        server=rows["repeat"].cast(pl.Int64).to_numpy(),
        level=rows["level"].cast(pl.Int64).to_numpy(),
        x=rows["cache_blocks"].cast(pl.Float64).to_numpy() / 1_000,
        time_s=rows["time_s"].cast(pl.Float64).to_numpy(),
        age_s=rows["age_s"].cast(pl.Float64).to_numpy(),
        values=rows[name].cast(pl.Float64).to_numpy(),
        control=_control(rows) if name in CONTROLLED else None,
    )


def _control(rows: pl.DataFrame) -> Floats | None:
    rest = rows[REST].cast(pl.Float64) if REST in rows.columns else pl.Series([None])
    if rest.null_count() or (rest <= 0).any():
        return None
    return np.asarray(rest.to_numpy(), float)


def _places(held: pl.DataFrame) -> pl.DataFrame:
    """Tabulate where and when the holds were."""
    return held.group_by(PLACE).agg(
        pl.col("many").first(),
        pl.col("cache_blocks", "age_s").mean(),
        (pl.col("t_ns").mean() / 1e9).alias("time_s"),
    )


def _rest(held: pl.DataFrame) -> pl.DataFrame:
    """Compute the median of what a step takes besides scheduler and connector."""
    rest = pl.col("step_us") - pl.col("overhead_us")
    own = held.filter("decode_only", rest.is_finite())
    return own.group_by(PLACE).agg(rest.cast(pl.Float64).median().alias(REST))


def _values(held: pl.DataFrame, metric: Metric, name: str = "us") -> pl.DataFrame:
    """Compute the mean without the slowest tenth of each hold's steps."""
    time = pl.col(metric.time)
    own = held.filter(time.is_finite(), pl.col("many") == metric.many)
    if metric.steps != "all":
        own = own.filter(metric.steps)
    usual = time.filter(time <= time.quantile(1 - SLOWEST, "higher")).mean()
    values = own.group_by(PLACE).agg(
        usual.cast(pl.Float64).alias(name), pl.len().alias("n")
    )
    return values.filter(pl.col("n") >= metric.least_steps).drop("n")


def long_steps(held: pl.DataFrame) -> pl.DataFrame:
    """Count the steps of each hold with few decoders, and the long ones.

    Long is one in which the connector's calls (without a connector, scheduler and
    calls) took LONG_US more than usual in its hold.
    """
    own = held.filter(~pl.col("many"))
    with_calls = own["connector_us"].null_count() < own.height
    time = pl.col("connector_us" if with_calls else "overhead_us")
    own = own.filter(time.is_finite())
    long = (time > time.median().over(PLACE) + LONG_US).alias("long")
    return (
        own.with_columns(long)
        .group_by(PLACE)
        .agg(pl.len().alias("steps"), pl.col("long").sum())
    )


def rare_steps(holds: pl.DataFrame) -> RareSteps | None:
    """Count the long steps of a table of holds by level; None without any holds."""
    own = holds.filter(pl.col("steps").is_not_null())
    if not own.height:
        return None
    levels = own.group_by("level").agg(pl.col("long", "steps").sum()).sort("level")
    return RareSteps(
        longer_by_us=LONG_US,
        steps=levels["steps"].cast(pl.Int64).to_list(),
        long=levels["long"].cast(pl.Int64).to_list(),
        chance=chance_of_rise(
            own["long"].cast(pl.Float64).to_numpy(),
            own["cache_blocks"].cast(pl.Float64).to_numpy(),
            own["repeat"].cast(pl.Int64).to_numpy(),
        ),
    )
