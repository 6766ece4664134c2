# SPDX-License-Identifier: Apache-2.0
"""The middle of a time, median or mean, server process by server process."""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl

from lab.stats.blocks import add_blocks, repeat_of_block, resample_blocks
from lab.stats.estimate import REPLICATES, Estimate, Floats, Ints
from lab.stats.processes import Repeats
from lab.stats.quantiles import median_estimate

Middle = Literal["median", "mean"]
# Variances are of values that the records round to 1 ns.
LEAST_VARIANCE = 1e-6
# A share of nothing is nothing: what a cost of 0 us is a share of.
LEAST_SCALE_US = 1e-3


def by_repeat(
    steps: pl.DataFrame, time: str, middle: Middle, mix: dict[int, float], seed: int
) -> dict[int, tuple[float, float]]:
    """(value in us, its variance) of each repeat in which `time` was measured.

    Batch size b weighs mix[b]; where a repeat lacks one, the others keep their
    proportions. The variance is that of a block bootstrap within the repeat.
    """
    known = steps.filter(pl.col(time).is_finite(), pl.col("batch").is_in(list(mix)))
    found = {}
    for (repeat,), own in known.group_by("repeat", maintain_order=True):
        estimate = _middle(own, time, middle, mix, seed + int(repeat))
        found[int(repeat)] = (estimate.value, _variance(estimate))
    return found


def repeats_of(found: dict[int, tuple[float, float]], scale: float) -> Repeats | None:
    """What `by_repeat` found as a sample of processes; None without one."""
    if not found:
        return None
    values, variances = np.array(list(found.values())).T
    return Repeats(values, variances, max(abs(scale), LEAST_SCALE_US))


def _middle(
    own: pl.DataFrame, time: str, middle: Middle, mix: dict[int, float], seed: int
) -> Estimate:
    blocked = add_blocks(own)
    values = own[time].cast(pl.Float64).to_numpy()
    batch = own["batch"].cast(pl.Int64).to_numpy()
    block = blocked["block"].cast(pl.Int64).to_numpy()
    repeats = repeat_of_block(blocked)
    there = {size: mix[size] for size in np.unique(batch).tolist()}
    if middle == "median":
        return median_estimate(values, batch, there, block, repeats, seed)
    return _mean(values, batch, there, block, repeats, seed)


def _mean(
    values: Floats,
    batch: Ints,
    mix: dict[int, float],
    block: Ints,
    repeats: Ints,
    seed: int,
) -> Estimate:
    """Mean of `values` in the mix of batch sizes; all of (steps,), `repeats` (blocks,).

    In a draw that lacks a batch size the others keep their proportions.
    """
    counts = resample_blocks(repeats, REPLICATES, np.random.default_rng(seed))
    counts = np.vstack([np.ones(len(repeats)), counts])
    total, weight = np.zeros(len(counts)), np.zeros(len(counts))
    for size, share in mix.items():
        own = batch == size
        steps = counts @ np.bincount(block[own], minlength=len(repeats))
        us = counts @ np.bincount(block[own], values[own], minlength=len(repeats))
        there = steps > 0
        total[there] += share * us[there] / steps[there]
        weight[there] += share
    means = total / weight
    return Estimate(float(means[0]), means[1:])


def _variance(estimate: Estimate) -> float:
    return max(float(np.var(estimate.draws)), LEAST_VARIANCE)
