# SPDX-License-Identifier: Apache-2.0
"""The middle of a time, median or mean, server process by server process."""

from __future__ import annotations

import numpy as np
import polars as pl

from lab.stats.blocks import (
    MIN_STEPS_PER_BLOCK,
    add_blocks,
    repeat_of_block,
    resample_blocks,
)
from lab.stats.estimate import REPLICATES, Estimate, Floats, Ints
from lab.stats.processes import Repeats
from lab.stats.quantiles import median_estimate
from microbench.analysis.metrics import Metric

# Variances are of values that the records round to 1 ns.
LEAST_VARIANCE = 1e-6
# A share of nothing is nothing: what a cost of 0 us is a share of.
LEAST_SCALE_US = 1e-3


def by_repeat(
    steps: pl.DataFrame, metric: Metric, mix: dict[int, float], seed: int
) -> dict[int, tuple[float, float]]:
    """(value in us, its variance) of `metric` in each repeat that has such steps.

    Group g of `metric.group` weighs mix[g]; where a repeat lacks one, the others keep
    their proportions. The variance is that of a block bootstrap within the repeat.
    """
    known = steps.with_columns(metric.group).filter(
        pl.col(metric.time).is_finite(), pl.col("group").is_in(list(mix))
    )
    found = {}
    for (repeat,), own in known.group_by("repeat", maintain_order=True):
        estimate = _middle(own, metric, mix, seed + int(repeat))
        found[int(repeat)] = (estimate.value, _variance(estimate))
    return found


def repeats_of(found: dict[int, tuple[float, float]], scale: float) -> Repeats | None:
    """What `by_repeat` found as a sample of processes; None without one."""
    if not found:
        return None
    values, variances = np.array(list(found.values())).T
    return Repeats(values, variances, max(abs(scale), LEAST_SCALE_US))


def _middle(
    own: pl.DataFrame, metric: Metric, mix: dict[int, float], seed: int
) -> Estimate:
    blocked = add_blocks(own, min(metric.block_steps, MIN_STEPS_PER_BLOCK))
    values = own[metric.time].cast(pl.Float64).to_numpy()
    group = own["group"].to_numpy()
    block = blocked["block"].cast(pl.Int64).to_numpy()
    repeats = repeat_of_block(blocked)
    there = {one: mix[one] for one in np.unique(group).tolist()}
    if metric.middle == "median":
        return median_estimate(values, group, there, block, repeats, seed)
    return _mean(values, group, there, block, repeats, seed)


def _mean(
    values: Floats,
    group: Ints,
    mix: dict[int, float],
    block: Ints,
    repeats: Ints,
    seed: int,
) -> Estimate:
    """Mean of `values` in the mix of groups; all of (steps,), `repeats` (blocks,).

    In a draw that lacks a group the others keep their proportions.
    """
    counts = resample_blocks(repeats, REPLICATES, np.random.default_rng(seed))
    counts = np.vstack([np.ones(len(repeats)), counts])
    total, weight = np.zeros(len(counts)), np.zeros(len(counts))
    for one, share in mix.items():
        own = group == one
        steps = counts @ np.bincount(block[own], minlength=len(repeats))
        us = counts @ np.bincount(block[own], values[own], minlength=len(repeats))
        there = steps > 0
        total[there] += share * us[there] / steps[there]
        weight[there] += share
    means = total / weight
    return Estimate(float(means[0]), means[1:])


def _variance(estimate: Estimate) -> float:
    return max(float(np.var(estimate.draws)), LEAST_VARIANCE)
