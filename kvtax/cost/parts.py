# SPDX-License-Identifier: Apache-2.0
"""A connector's time by method, and the CPU time of each thread of the engine."""

from __future__ import annotations

import polars as pl

from kvtax.cost.holds import holds_of
from kvtax.cost.measured import Measured
from kvtax.cost.metrics import Metric, number
from kvtax.records.estimate import Estimate
from kvtax.records.per_config import ConfigEntry, PartCost
from kvtax.records.requests import Phase
from kvtax.records.step_table import CALLS, method_columns
from kvtax.stats.held import Fit, fit


def set_parts(entry: ConfigEntry, one: Measured) -> None:
    """Fill in `connector`, `methods` and `threads`: means and slopes of the holds."""
    held = one.held
    if held["connector_us"].null_count() < held.height:
        entry.connector = _part(one, "connector_us")
    entry.methods = {
        name.removesuffix("_us"): _part(one, name) for name in method_columns(held)
    }
    threads = one.threads.filter(pl.col("phase") == Phase.HOLD)
    entry.threads = {
        str(name): _thread(one, samples)
        for (name,), samples in threads.group_by("thread", maintain_order=True)
    }


def _part(one: Measured, time: str) -> PartCost:
    steps = max(one.held.height, 1)
    calls = time.removesuffix("_us") + CALLS
    per_step = None
    if calls in one.held.columns:
        per_step = round(number(one.held[calls].sum()) / steps, 3)
    return PartCost(
        calls_per_step=per_step,
        slope_per_1k_blocks=_slope(one.slope_of(time)),
        us_per_step=round(number(one.held[time].sum()) / steps, 3),
    )


def _thread(one: Measured, samples: pl.DataFrame) -> PartCost:
    holds = holds_of(samples, one.at, Metric("us_per_step", "all", "mean", 1))
    sampled = max(number(samples["steps"].sum()), 1)
    return PartCost(
        slope_per_1k_blocks=_slope(None if holds is None else fit(holds)),
        us_per_step=round(number(samples["us"].sum()) / sampled, 3),
    )


def _slope(found: Fit | None) -> Estimate | None:
    if found is None:
        return None
    slope, error = found.slope()
    reach = found.reach(error)
    return Estimate(round(slope, 3), (round(slope - reach, 3), round(slope + reach, 3)))
