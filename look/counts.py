# SPDX-License-Identifier: Apache-2.0
"""Steps as counts that can be added: of many servers, on many hosts, and still small.

A step is counted in the cell of its |cache|, to 1,000 blocks, and its running requests,
to a quarter, and exactly up to 7. In a cell each time has a histogram whose buckets are
2 % wide, as in DDSketch (Masson, Rim and Lee 2019), and each bucket knows how many
steps it has and their whole time. To merge is to add: in any order, with the same
result, to the last bit.

A quantile is that of all steps within 1 %, or 1 ns where that is more. Counts, means,
the most and what is computed from means are exact to the 0.5 ns that times are rounded
to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from lab.stats.estimate import Floats
from look.instances import Instance

ALPHA = 0.01
GAMMA = (1 + ALPHA) / (1 - ALPHA)
CACHE_BLOCKS = 1_000
# As for look.moves: with less |cache| hardly changed.
LEAST_RANGE_BLOCKS = 500
CELL = ("cache_from", "running_from")
KEYS = ("time", *CELL, "bucket")
# As polars adds them: `steps`, `calls` of the method, their ns, and their |cache|.
SUMS = ("steps", "calls", "sum_ns", "sum_blocks")
SCHEMA = {
    "time": pl.String,
    "cache_from": pl.Int32,
    "running_from": pl.Int32,
    "bucket": pl.Int32,
    "steps": pl.Int64,
    "calls": pl.Int64,
    "sum_ns": pl.Int64,
    "sum_blocks": pl.Int64,
    "most_ns": pl.Int64,
}
NOTHING = pl.DataFrame(schema=SCHEMA)
PARTS = ("step_us", "model_us", "scheduler_us", "connector_us", "other_us")


def counts_of(instance: Instance) -> pl.DataFrame:
    """The counts of an instance's steps: a row per time, cell and bucket (SCHEMA).

    Times are those of look.cost: a step, its parts, the connector's methods. Cells are
    null where the records do not tell them.
    """
    steps = instance.steps.with_columns(_cells())
    times = (*PARTS, *instance.methods)
    return merged(_counted(steps, time) for time in times)


def merged(several: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """All of them as one, in order of KEYS."""
    return (
        pl.concat([NOTHING, *several])
        .group_by(KEYS)
        .agg(pl.col(SUMS).sum(), pl.col("most_ns").max())
        .sort(KEYS)
    )


def quantiles(counts: pl.DataFrame, shares: Sequence[float]) -> list[float]:
    """In us, of the steps of one time: the values that look.cost.quantiles is near."""
    buckets = counts.group_by("bucket").agg(pl.col("steps").sum()).sort("bucket")
    below = buckets["steps"].cum_sum().to_numpy()
    ranks = [math.floor((below[-1] - 1) * share + 0.5) for share in shares]
    at = np.searchsorted(below, ranks, side="right")
    return (_middle_ns(buckets["bucket"].to_numpy()[at]) / 1e3).tolist()


def means(counts: pl.DataFrame) -> pl.DataFrame:
    """Of one time by cell: CELL, `steps`, mean `us` and mean `blocks`."""
    return (
        counts.group_by(CELL)
        .agg(pl.col(SUMS).sum())
        .select(
            *CELL,
            "steps",
            (pl.col("sum_ns") / pl.col("steps") / 1e3).alias("us"),
            (pl.col("sum_blocks") / pl.col("steps")).alias("blocks"),
        )
        .sort(CELL)
    )


def slope(counts: pl.DataFrame) -> float | None:
    """us per 1,000 cached blocks at equal running requests, or None if |cache| stands.

    Least squares on the cells' means, each by its steps, with an offset for each
    number of running requests.
    """
    cells = means(counts.drop_nulls(CELL))
    steps, us, blocks = (
        cells[name].cast(pl.Float64).to_numpy() for name in ("steps", "us", "blocks")
    )
    group = cells["running_from"].rank("dense").to_numpy() - 1
    run = _from_mean(blocks / 1_000, steps, group)
    square = float((steps * run**2).sum())
    if cells.height < 2 or np.ptp(blocks) < LEAST_RANGE_BLOCKS or square < 1e-9:
        return None
    return float((steps * run * _from_mean(us, steps, group)).sum()) / square


def _from_mean(of: Floats, weight: Floats, group: np.ndarray) -> Floats:
    """`of` less its mean in each group."""
    total = np.bincount(group, weight)
    return of - (np.bincount(group, weight * of) / np.maximum(total, 1e-12))[group]


def _cells() -> list[pl.Expr]:
    running = pl.col("running").clip(lower_bound=1)
    quarter = 2 ** (running.log(2).floor() - 2).clip(lower_bound=0)
    return [
        (pl.col("cache_size") // CACHE_BLOCKS * CACHE_BLOCKS).alias("cache_from"),
        ((running / quarter).floor() * quarter).cast(pl.Int32).alias("running_from"),
    ]


def _counted(steps: pl.DataFrame, time: str) -> pl.DataFrame:
    calls = time.removesuffix("_us") + "_calls"
    ns = (pl.col(time).cast(pl.Float64) * 1e3).round().cast(pl.Int64)
    return (
        steps.lazy()
        .select(
            *CELL,
            ns.alias("ns"),
            pl.col("cache_size").fill_null(0).cast(pl.Int64).alias("blocks"),
            (pl.col(calls) if calls in steps.columns else pl.lit(0)).alias("calls"),
        )
        .with_columns(_bucket().alias("bucket"))
        .group_by(*CELL, "bucket")
        .agg(
            pl.len().cast(pl.Int64).alias("steps"),
            pl.col("calls").cast(pl.Int64).sum(),
            pl.col("ns").sum().alias("sum_ns"),
            pl.col("blocks").sum().alias("sum_blocks"),
            pl.col("ns").max().alias("most_ns"),
        )
        .select(pl.lit(time).alias("time"), pl.all())
        .collect()
        .cast(SCHEMA)
    )


def _bucket() -> pl.Expr:
    """In order of their values: 0 for 0, below it those of times below zero."""
    ns = pl.col("ns")
    number = (ns.abs().clip(lower_bound=1).log() / math.log(GAMMA)).ceil() + 1
    return (ns.sign() * number).cast(pl.Int32)


def _middle_ns(bucket: np.ndarray) -> Floats:
    """The value within ALPHA of all in the bucket."""
    above = 2 * GAMMA ** (np.abs(bucket) - 1.0) / (GAMMA + 1)
    return np.sign(bucket) * np.where(np.abs(bucket) == 1, 1.0, above)
