# SPDX-License-Identifier: Apache-2.0
"""What a connector's time is made of, over all steps of growth: by method, by thread.

And the same time on three axes: per step, per second of the engine's time, and per
1,000 tokens. A step that prefills serves thousands of tokens at once, and a slow engine
makes few steps, so each of the three tells something else. All slopes are of means over
blocks of neighbouring steps.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from lab.records.joined_steps import CALLS, method_columns
from lab.stats.blocks import add_blocks
from lab.stats.estimate import Estimate
from lab.stats.interval import stated
from lab.stats.mean_slope import mean_slopes
from lab.stats.processes import Repeats
from microbench.analysis.middle import LEAST_SCALE_US

PER = {
    "us_per_step": pl.len(),
    # The last step of a block ends step_us after it began.
    "us_per_s": (
        pl.col("t_ns").last() / 1e9
        - pl.col("t_ns").first() / 1e9
        + pl.col("step_us").last() / 1e6
    ),
    "us_per_1k_tokens": pl.col("tokens").sum() / 1_000,
}
KINDS = ("connector", "methods", "threads")


def parts_by_repeat(
    growth: pl.DataFrame, threads: pl.DataFrame
) -> dict[str, Repeats | None]:
    """Slopes per 1,000 cached blocks: `connector/AXIS`, `methods/NAME`, `threads/NAME`.

    `growth` are all steps of the growth phase, `threads` the table of a trial's threads
    in it (microbench.analysis.threads). None where there are too few blocks.
    """
    blocks = _blocks(growth)
    found = {}
    if growth["connector_us"].null_count() < growth.height:
        found = {
            f"connector/{axis}": _slope(blocks, f"connector/{axis}") for axis in PER
        }
    for name in method_columns(growth):
        found[f"methods/{name}"] = _slope(blocks, f"methods/{name}")
    for (name,), samples in threads.group_by("thread", maintain_order=True):
        found[f"threads/{name}"] = _slope(samples, "us_per_step")
    return {part: slope for part, slope in found.items() if slope is not None}


def parts_entry(
    growth: pl.DataFrame,
    threads: pl.DataFrame,
    slopes: dict[str, Estimate | None],
) -> dict[str, dict[str, Any]]:
    """The fields `connector`, `methods` and `threads` of a config's entry."""
    told: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    blocks, steps = _blocks(growth), max(growth.height, 1)
    for part, slope in slopes.items():
        kind, _, name = part.partition("/")
        one = {"slope_per_1k_blocks": stated(slope, 3)}
        if kind == "connector":
            one["mean"] = _mean(blocks[part])
        elif kind == "methods":
            calls = growth[name.removesuffix("_us") + CALLS].sum()
            one = {"calls_per_step": round(calls / steps, 3)} | one
            one["us_per_step"] = round(growth[name].sum() / steps, 3)
            name = name.removesuffix("_us")
        else:
            own = threads.filter(pl.col("thread") == name)
            one["us_per_step"] = round(own["us"].sum() / max(own["steps"].sum(), 1), 3)
        told[kind][name] = one
    return told


def _blocks(growth: pl.DataFrame) -> pl.DataFrame:
    """A row per block of neighbouring steps, with the cost of each part in it."""
    methods = method_columns(growth)
    return (
        add_blocks(growth)
        .group_by("block", maintain_order=True)
        .agg(
            pl.col("repeat").first(),
            pl.lit(0).alias("batch"),
            pl.col("cache_blocks").mean(),
            *(
                (pl.col("connector_us").sum() / amount).alias(f"connector/{axis}")
                for axis, amount in PER.items()
            ),
            *((pl.col(m).sum() / pl.len()).alias(f"methods/{m}") for m in methods),
        )
    )


def _slope(rows: pl.DataFrame, cost: str) -> Repeats | None:
    found = mean_slopes(rows, cost, block_steps=1)
    if found is None:
        return None
    return Repeats(*found, max(abs(_mean(rows[cost])), LEAST_SCALE_US))


def _mean(values: pl.Series) -> float:
    return round(float(values.mean() or 0.0), 3)
