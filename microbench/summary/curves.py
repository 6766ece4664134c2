# SPDX-License-Identifier: Apache-2.0
"""A time against |cache|: the numbers behind the curves of a run's figures."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from lab.records.phases import Phase
from lab.stats.slope import batch_held_us, group_of, make_cells, slope_value
from microbench.analysis.levels import thin
from microbench.analysis.measured import Measured

BINS = 30
MIN_STEPS_PER_BIN = 20
MAX_STEPS = 300_000
BAND = {"p25_us": 0.25, "p50_us": 0.5, "p75_us": 0.75}


def binned_curves(measured: Mapping[str, Measured], time: str) -> pl.DataFrame:
    """p25, p50, p75 of `time` in the growth phase by |cache| bin and config.

    Repeat and batch size are held as in the verdict (batch_held_us), with the slope of
    the very times that are drawn. Bins are as wide in every config.
    """
    growths = {
        name: thin(
            one.steps.filter(pl.col("phase") == Phase.GROWTH), MAX_STEPS
        ).drop_nulls(time)
        for name, one in measured.items()
    }
    drawn = {name: growth for name, growth in growths.items() if growth.height}
    if not drawn:
        return pl.DataFrame(schema={"config": pl.String})
    top = max(growth["cache_blocks"].max() for growth in drawn.values())
    width = max(top, 1) / BINS
    return pl.concat(
        _binned(_held(growth, time), width).select(
            pl.lit(name).alias("config"), "cache_blocks", "steps", *BAND
        )
        for name, growth in drawn.items()
    )


def _held(growth: pl.DataFrame, time: str) -> pl.DataFrame:
    """Columns cache_blocks and us: `time` with repeat and batch size held."""
    blocks = growth["cache_blocks"].cast(pl.Float64).to_numpy()
    repeat, batch = (
        growth[name].cast(pl.Int64).to_numpy() for name in ("repeat", "batch")
    )
    us = batch_held_us(
        growth[time].cast(pl.Float64).to_numpy(),
        blocks,
        group_of(repeat, batch),
        slope_value(make_cells(growth, (time,)), time),
    )
    return pl.DataFrame({"cache_blocks": blocks, "us": us})


def _binned(held: pl.DataFrame, width: float) -> pl.DataFrame:
    """One row per bin of `width` blocks that has enough steps, at its middle."""
    place = (pl.col("cache_blocks") // width).clip(0, BINS - 1).alias("bin")
    return (
        held.group_by(place)
        .agg(
            pl.len().alias("steps"),
            *(
                pl.col("us").quantile(q, "linear").round(3).alias(column)
                for column, q in BAND.items()
            ),
        )
        .filter(pl.col("steps") >= MIN_STEPS_PER_BIN)
        .sort("bin")
        .with_columns(((pl.col("bin") + 0.5) * width).round(1).alias("cache_blocks"))
    )
