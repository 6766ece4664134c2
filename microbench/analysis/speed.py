# SPDX-License-Identifier: Apache-2.0
"""The overhead at the machine's usual speed.

A shared machine is faster or slower for seconds at a time, which tilts a slope as
growth would. The null model shows how fast the machine is: apart from the sleep and the
connector's calls, its step is the model runner's own Python, run by the same thread
in the same step, whatever |cache| is. Each block of steps is divided by how slow that
Python was in it, which takes the machine out (a ratio estimator). The execution of a
real model is not such a clock.
"""

from __future__ import annotations

import polars as pl

from lab.stats.blocks import add_blocks
from microbench.analysis.steps import CONNECTOR_TIMES


def at_usual_speed(steps: pl.DataFrame, forward_us: float) -> pl.DataFrame:
    """`steps` (grouped by repeat, in step order) with overhead_us divided by the speed.

    The speed of a block of steps is the median of model runner time over its usual
    value, the median of its batch size; 1 where it was not measured.
    """
    connector = pl.sum_horizontal(pl.col(name).fill_null(0) for name in CONNECTOR_TIMES)
    runner = pl.col("execute_model_us") - connector - forward_us
    usual = runner.median().over("batch")
    speed = pl.col("slowness").median().over("block")
    known = pl.when(speed > 0).then(speed).otherwise(1.0)
    return (
        add_blocks(steps)
        .with_columns((runner / usual).alias("slowness"))
        .with_columns(pl.col("overhead_us") / known)
        .drop("block", "slowness")
    )
