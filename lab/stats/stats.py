# SPDX-License-Identifier: Apache-2.0
"""Estimators that survive noisy neighbours: a robust slope, standardised levels.

On shared cores 1 to 5 % of the steps are 2 to 100 times slower than the rest, and
neighbouring steps resemble each other. So every location here is a median, every
slope a median of slopes, and every interval comes from resampling blocks of steps
that follow one another, not single steps.

- Blocks: the steps of one repeat, in order, cut into at most BLOCKS equal runs.
- Slope: Theil-Sen (Theil 1950, Sen 1968; weighted as in Jaeckel 1972) over cells. A
  cell is the median |cache| and the median time of the steps of one block and one
  batch size. Only cells of the same repeat and the same batch size are paired, so
  neither a batch that grows with |cache| nor an offset between repeats can tilt it.
- Level: quantiles of the steps, each batch size weighted to its share in a common
  mix, so that two configs are compared at the same batch sizes.
- Interval: percentile block bootstrap (Kunsch 1989; Davison and Hinkley 1997, 8.2),
  fixed seed. With several repeats it has two stages, repeats first and then blocks
  within each, so a difference between repeats widens it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SEED = 20_240_731
REPLICATES = 500
# 40 blocks: an interval from fewer is too narrow, and the pairs go with the square.
BLOCKS = 40
MIN_STEPS_PER_BLOCK = 20
# Fewer blocks than this in a repeat give no interval worth stating.
MIN_BLOCKS = 8
# A median of fewer steps than this is not a location.
MIN_STEPS_PER_CELL = 3
# Replicates weighted at once: bounds memory at 25 x pairs x 8 bytes.
REPLICATE_CHUNK = 25
HISTOGRAM_BINS = 400


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap values, (replicates,)."""

    value: float
    draws: Floats

    @property
    def ci95(self) -> tuple[float, float]:
        low, high = np.quantile(self.draws, (0.025, 0.975))
        return float(low), float(high)

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        # The two were drawn independently, so pairing them by index is as good as any.
        return Estimate(self.value - other.value, self.draws - other.draws)

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two independent estimates, `other` away from zero."""
        return Estimate(self.value / other.value, self.draws / other.draws)


@dataclass(frozen=True)
class Cells:
    """Medians of the steps of one (block, batch size); all arrays are (cells,).

    `block` numbers the blocks of all repeats; `repeat_of_block` is (blocks,).
    """

    block: Ints
    batch: Ints
    steps: Ints
    cache_blocks: Floats
    time_us: dict[str, Floats]
    repeat_of_block: Ints


def add_blocks(steps: pl.DataFrame) -> pl.DataFrame:
    """`steps` (grouped by repeat, in step order) with a column `block`, from 0 on."""
    counts = steps["repeat"].rle().struct.unnest()["len"].to_list()
    first, parts = 0, []
    for count in counts:
        blocks = int(np.clip(count // MIN_STEPS_PER_BLOCK, 1, BLOCKS))
        index = np.arange(count, dtype=np.int64) * blocks // max(count, 1)
        parts.append((index + first).astype(np.int32))
        first += blocks
    block = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return steps.with_columns(pl.Series("block", block))


def make_cells(steps: pl.DataFrame, times: tuple[str, ...]) -> Cells:
    """Cells of `steps` (columns repeat, batch, cache_blocks and `times`)."""
    blocked = add_blocks(steps)
    table = (
        blocked.lazy()
        .group_by("block", "batch")
        .agg(
            pl.len().alias("steps"),
            pl.col("cache_blocks").median(),
            *(pl.col(name).median() for name in times),
        )
        .filter(pl.col("steps") >= MIN_STEPS_PER_CELL)
        .sort("block", "batch")
        .collect()
    )
    repeats = blocked.group_by("block").agg(pl.col("repeat").first()).sort("block")

    def column(name: str) -> Floats:
        return table[name].cast(pl.Float64).to_numpy()

    return Cells(
        block=table["block"].cast(pl.Int64).to_numpy(),
        batch=table["batch"].cast(pl.Int64).to_numpy(),
        steps=table["steps"].cast(pl.Int64).to_numpy(),
        cache_blocks=column("cache_blocks"),
        time_us={name: column(name) for name in times},
        repeat_of_block=repeats["repeat"].cast(pl.Int64).to_numpy(),
    )


def resample_blocks(
    repeat_of_block: Ints, replicates: int, rng: np.random.Generator
) -> Floats:
    """How often each block is drawn in each replicate: (replicates, blocks)."""
    repeats, sizes = np.unique(repeat_of_block, return_counts=True)
    share = np.full(len(repeats), 1 / len(repeats))
    drawn = rng.multinomial(len(repeats), share, size=replicates)
    counts = np.zeros((replicates, len(repeat_of_block)))
    for index, (repeat, size) in enumerate(zip(repeats, sizes, strict=True)):
        within = rng.multinomial(drawn[:, index] * size, np.full(size, 1 / size))
        counts[:, repeat_of_block == repeat] = within
    return counts


def _pairs(cells: Cells, keep: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Indices i < j of the cells of one repeat and one batch size, over all of them."""
    lefts, rights = [], []
    key = cells.repeat_of_block[cells.block] * 1_000_000 + cells.batch
    for group in np.unique(key[keep]):
        members = np.flatnonzero((key == group) & keep)
        left, right = np.triu_indices(len(members), k=1)
        lefts.append(members[left])
        rights.append(members[right])
    if not lefts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(lefts), np.concatenate(rights)


def slope_us_per_1k_blocks(
    cells: Cells, time: str, seed: int = SEED
) -> Estimate | None:
    """Slope of the median `time` in us per 1,000 cached blocks, batch size held.

    A pair of cells weighs |d cache| / sqrt(1/n_i + 1/n_j), one over the standard
    error of its slope. None when there are too few blocks or |cache| never moved.
    """
    us = cells.time_us[time]
    left, right = _pairs(cells, np.isfinite(us))
    run = (cells.cache_blocks[right] - cells.cache_blocks[left]) / 1_000
    moved = run != 0
    left, right, run = left[moved], right[moved], run[moved]
    if len(np.unique(cells.block[left])) < MIN_BLOCKS - 1:
        return None
    slope = (us[right] - us[left]) / run
    weight = np.abs(run) / np.sqrt(1 / cells.steps[left] + 1 / cells.steps[right])
    order = np.argsort(slope)
    slope, weight = slope[order], weight[order]
    left, right = cells.block[left[order]], cells.block[right[order]]

    rng = np.random.default_rng(seed)
    counts = resample_blocks(cells.repeat_of_block, REPLICATES, rng)
    draws = [
        _weighted_medians(slope, weight * chunk[:, left] * chunk[:, right])
        for chunk in np.split(counts, REPLICATES // REPLICATE_CHUNK)
    ]
    value = float(_weighted_medians(slope, weight[None, :])[0])
    finite = np.concatenate(draws)
    return Estimate(value, np.where(np.isfinite(finite), finite, value))


def _weighted_medians(ordered: Floats, weights: Floats) -> Floats:
    """Weighted median of `ordered` (n,), for each row of `weights` (rows, n)."""
    total = np.cumsum(weights, axis=1)
    middle = (total < total[:, -1:] / 2).sum(axis=1)
    medians = ordered[np.minimum(middle, len(ordered) - 1)].astype(float)
    medians[total[:, -1] <= 0] = np.nan
    return medians


def weighted_quantiles(
    values: Floats, weights: Floats, quantiles: tuple[float, ...]
) -> list[float]:
    """Smallest values at which the summed weight reaches each quantile."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    index = np.searchsorted(total, np.asarray(quantiles) * total[-1] * (1 - 1e-12))
    return [float(v) for v in values[order][np.minimum(index, len(values) - 1)]]


def mix_weights(batch: Ints, mix: dict[int, float]) -> Floats:
    """Weight of each step so that batch size b weighs mix[b] in all; 0 outside it."""
    weights = np.zeros(len(batch))
    for size, share in mix.items():
        member = batch == size
        if member.any():
            weights[member] = share / member.sum()
    return weights


def median_estimate(
    values: Floats,
    batch: Ints,
    mix: dict[int, float],
    block: Ints,
    repeat_of_block: Ints,
    seed: int = SEED,
) -> Estimate:
    """Median of `values` in the mix of batch sizes, with a block bootstrap.

    `values`, `batch` and `block` are (steps,). The draws come from histograms, one a
    block and batch size, summed as drawn and weighted to the mix again. They have 400
    bins between the 10th and 90th percentile: no median falls outside, and the bins
    stay fine however long the tail.
    """
    weights = mix_weights(batch, mix)
    value = weighted_quantiles(values, weights, (0.5,))[0]
    low, high = weighted_quantiles(values, weights, (0.1, 0.9))
    edges = np.linspace(low, max(high, low + 1e-9), HISTOGRAM_BINS + 1)
    place = np.clip(np.searchsorted(edges, values, "right") - 1, 0, HISTOGRAM_BINS - 1)
    blocks = len(repeat_of_block)
    counts = resample_blocks(repeat_of_block, REPLICATES, np.random.default_rng(seed))
    heights = np.zeros((REPLICATES, HISTOGRAM_BINS))
    for size, share in mix.items():
        own = batch == size
        flat = np.bincount(
            block[own] * HISTOGRAM_BINS + place[own], minlength=blocks * HISTOGRAM_BINS
        )
        drawn = counts @ flat.reshape(blocks, HISTOGRAM_BINS).astype(float)
        heights += share * drawn / np.maximum(drawn.sum(axis=1, keepdims=True), 1)
    draws = _weighted_medians((edges[:-1] + edges[1:]) / 2, heights)
    return Estimate(value, np.where(np.isfinite(draws), draws, value))


def line_fit_r2(x: Floats, y: Floats) -> float:
    """R^2 of the least-squares line through the points (x, y)."""
    slope, intercept = np.polyfit(x, y, 1)
    rest = ((y - slope * x - intercept) ** 2).sum()
    spread = ((y - y.mean()) ** 2).sum()
    return float(1 - rest / spread) if spread > 0 else float("nan")
