# SPDX-License-Identifier: Apache-2.0
"""The slope of a step's mean time in |cache|: it sees costs that most steps do not pay.

A median does not move for a cost paid in every third step. A mean does, but it moves
for a stall of the machine, too. The two are told apart by how often they come. The
steps of a repeat are cut into blocks of 50. What 1 step in 50 pays is in most blocks
(63 % if it comes at random, all if it is regular), so a block is expected to hold it.
A stall hits a few blocks, and those count less: Tukey's biweight on the residuals of
whole blocks (Beaton and Tukey 1974), never on those of steps. So a cost that misses
half of the blocks, in fewer than 1.4 % of the steps, may pass for stalls.

The variance is a jackknife that leaves out runs of neighbouring blocks, a tenth of the
repeat each (Kunsch 1989): it holds for noise that is forgotten within such a run.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from lab.stats.estimate import Floats, Ints

BLOCK_STEPS = 50
RUNS = 10
# Wide: a rare cost that grows leaves residuals of 5 scales, a stall of 5 ms some 50.
BIWEIGHT = 9.0
ROUNDS = 20


def mean_slopes(
    steps: pl.DataFrame,
    time: str,
    held: tuple[str, ...] = ("batch",),
    block_steps: int = BLOCK_STEPS,
    beside: tuple[str, ...] = (),
) -> tuple[Floats, Floats] | None:
    """Slope of the mean `time` in us per 1,000 cached blocks: values, variances.

    `steps` has the columns repeat, cache_blocks, `time` (us), `held` and `beside`,
    grouped by repeat and in step order. Each combination of `held` gets an offset of
    its own. In what is `beside` the time may rise, too: each gets a slope of its own.
    Both results are (repeats,), in order; a repeat of fewer than 10 blocks of
    `block_steps`, or whose |cache| stands still, is left out. None if all are.
    """
    fits = [
        _fit(one, time, held, block_steps, beside)
        for one in steps.partition_by("repeat", maintain_order=True)
    ]
    found = np.array([fit for fit in fits if fit is not None and np.isfinite(fit[0])])
    return (found[:, 0], found[:, 1]) if len(found) else None


def _fit(
    steps: pl.DataFrame,
    time: str,
    held: tuple[str, ...],
    block_steps: int,
    beside: tuple[str, ...],
) -> tuple[float, float] | None:
    """(slope, its variance) of one repeat."""
    steps = steps.filter(pl.col(time).is_finite())
    blocks = steps.height // block_steps
    if blocks < RUNS:
        return None
    group = pl.struct(held).rank("dense") - 1 if held else pl.lit(0)
    cells = (
        steps.select(
            pl.int_range(pl.len()).alias("block") * blocks // pl.len(),
            group.alias("group"),
            pl.col("cache_blocks") / 1_000,
            pl.col(time).alias("us"),
            *(pl.col(name).cast(pl.Float64) for name in beside),
        )
        .group_by("block", "group", maintain_order=True)
        .agg(pl.len().alias("steps"), pl.col("cache_blocks", "us", *beside).mean())
    )
    block, group = (
        cells[name].cast(pl.Int64).to_numpy() for name in ("block", "group")
    )
    size, cache, us = (
        cells[name].cast(pl.Float64).to_numpy()
        for name in ("steps", "cache_blocks", "us")
    )
    known = cells.select(beside).to_numpy()
    weight = size * _block_weights(cache, us, size, group, block, known)[block]
    slope, _ = _line(cache, us, weight, group, known)
    run = block * RUNS // blocks
    without = [
        _line(cache, us, weight * (run != one), group, known)[0] for one in range(RUNS)
    ]
    return slope, (RUNS - 1) * float(np.var(without))


def _line(
    cache: Floats, us: Floats, weight: Floats, group: Ints, known: Floats
) -> tuple[float, Floats]:
    """Weighted least squares with an offset for each group: (slope, residuals).

    What `known`, (cells, K), explains of both is taken out first (Frisch and Waugh).
    """
    total = np.maximum(np.bincount(group, weight), 1e-12)

    def from_mean(of: Floats) -> Floats:
        return of - (np.bincount(group, weight * of) / total)[group]

    run, rise = from_mean(cache), from_mean(us)
    if known.shape[1]:
        root = np.sqrt(weight)[:, None]
        others = np.stack([from_mean(one) for one in known.T], axis=1)
        both = np.stack([run, rise], axis=1)
        explained, *_ = np.linalg.lstsq(root * others, root * both, rcond=None)
        run, rise = (both - others @ explained).T
    square = float((weight * run**2).sum())
    slope = float((weight * run * rise).sum()) / square if square > 1e-9 else np.nan
    return slope, rise - slope * run


def _block_weights(
    cache: Floats, us: Floats, size: Floats, group: Ints, block: Ints, known: Floats
) -> Floats:
    """How much each block counts, (blocks,), from 0 to 1.

    Least absolute deviations first, as a start that no stall can pull away.
    """
    steps = np.bincount(block, size)
    weights = np.ones(len(steps))
    for again in range(2 * ROUNDS):
        _, left = _line(cache, us, size * weights[block], group, known)
        left = np.bincount(block, size * left) / steps
        left -= np.median(left)
        scale = max(1.4826 * float(np.median(np.abs(left))), 1e-9)
        if again < ROUNDS:
            weights = 1 / np.maximum(np.abs(left) / scale, 0.05)
        else:
            weights = np.clip(1 - (left / scale / BIWEIGHT) ** 2, 0, None) ** 2
    return weights
