# SPDX-License-Identifier: Apache-2.0
"""The slope of a step's time in |cache|, batch size held.

Theil-Sen (Theil 1950, Sen 1968; weighted as in Jaeckel 1972) over cells. A cell is the
median |cache| and the median time of the steps of one block and one batch size. Only
cells of the same repeat and the same batch size are paired, so neither a batch that
grows with |cache| nor an offset between repeats can tilt the slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvtax.stats.distribution import REPLICATES, SEED, Distribution, Floats, Ints
from kvtax.stats.quantiles import weighted_medians
from kvtax.stats.resampling import add_blocks, repeat_of_block, resample_blocks

# Fewer blocks than this in a repeat give no interval worth stating.
MIN_BLOCKS = 8
# A median of fewer steps than this is not a location.
MIN_STEPS_PER_CELL = 3
# Replicates weighted at once: bounds memory at 25 x pairs x 8 bytes.
REPLICATE_CHUNK = 25


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

    @property
    def group(self) -> Ints:
        """(cells,): equal numbers are one repeat and one batch size."""
        return group_of(self.repeat_of_block[self.block], self.batch)

    def where(self, mask: NDArray[np.bool_]) -> Cells:
        """Select the cells of `mask`; renumber blocks: only used ones are drawn."""
        used, block = np.unique(self.block[mask], return_inverse=True)
        return Cells(
            block=block,
            batch=self.batch[mask],
            steps=self.steps[mask],
            cache_blocks=self.cache_blocks[mask],
            time_us={name: us[mask] for name, us in self.time_us.items()},
            repeat_of_block=self.repeat_of_block[used],
        )


def group_of(repeat: Ints, batch: Ints) -> Ints:
    """Give each pair of repeat and batch size a number."""
    return repeat * 1_000_000 + batch


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

    def column(name: str) -> Floats:
        return table[name].cast(pl.Float64).to_numpy()

    return Cells(
        block=table["block"].cast(pl.Int64).to_numpy(),
        batch=table["batch"].cast(pl.Int64).to_numpy(),
        steps=table["steps"].cast(pl.Int64).to_numpy(),
        cache_blocks=column("cache_blocks"),
        time_us={name: column(name) for name in times},
        repeat_of_block=repeat_of_block(blocked),
    )


@dataclass(frozen=True)
class _Pairs:
    """Slopes between pairs of cells, ascending; all arrays are (pairs,)."""

    slope: Floats
    weight: Floats
    left_block: Ints
    right_block: Ints

    def median(self) -> float:
        return float(weighted_medians(self.slope, self.weight[None, :])[0])


def _pairs(cells: Cells, time: str) -> _Pairs | None:
    """Pairs of one repeat and batch size; None if too few blocks, or |cache| is still.

    A pair of cells weighs |d cache| / sqrt(1/n_i + 1/n_j), one over the standard error
    of its slope.
    """
    us = cells.time_us[time]
    left, right = _pair_indices(cells.group, np.isfinite(us))
    run = (cells.cache_blocks[right] - cells.cache_blocks[left]) / 1_000
    moved = run != 0
    left, right, run = left[moved], right[moved], run[moved]
    if len(np.unique(cells.block[left])) < MIN_BLOCKS - 1:
        return None
    slope = (us[right] - us[left]) / run
    weight = np.abs(run) / np.sqrt(1 / cells.steps[left] + 1 / cells.steps[right])
    order = np.argsort(slope)
    left, right = cells.block[left[order]], cells.block[right[order]]
    return _Pairs(slope[order], weight[order], left, right)


def _pair_indices(group: Ints, keep: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """List indices i < j of the cells to keep that are of one group."""
    lefts: list[Ints] = [np.zeros(0, np.int64)]
    rights: list[Ints] = [np.zeros(0, np.int64)]
    for one in np.unique(group[keep]):
        members = np.flatnonzero((group == one) & keep)
        left, right = np.triu_indices(len(members), k=1)
        lefts.append(members[left].astype(np.int64))
        rights.append(members[right].astype(np.int64))
    return np.concatenate(lefts), np.concatenate(rights)


def slope_us_per_1k_blocks(
    cells: Cells, time: str, seed: int = SEED
) -> Distribution | None:
    """Slope of the median `time` in us per 1,000 cached blocks, batch size held.

    None when there are too few blocks or |cache| never moved.
    """
    pairs = _pairs(cells, time)
    if pairs is None:
        return None
    rng = np.random.default_rng(seed)
    counts = resample_blocks(cells.repeat_of_block, REPLICATES, rng)
    draws = np.concatenate(
        [
            weighted_medians(
                pairs.slope,
                pairs.weight * chunk[:, pairs.left_block] * chunk[:, pairs.right_block],
            )
            for chunk in np.split(counts, REPLICATES // REPLICATE_CHUNK)
        ]
    )
    value = pairs.median()
    return Distribution(value, np.where(np.isfinite(draws), draws, value))


def slope_value(cells: Cells, time: str) -> float:
    """Fit the slope alone, without an interval; 0 where none can be estimated."""
    pairs = _pairs(cells, time)
    return 0.0 if pairs is None else pairs.median()


def batch_held_us(
    us: Floats,
    cache_blocks: Floats,
    group: Ints,
    slope_us_per_1k_blocks: float,
    steps: Ints | None = None,
) -> Floats:
    """`us` less the offset of its repeat and batch size (group_of); arrays are (n,).

    An offset is the median of what the slope leaves over, so taking it out does not
    take the growth out where batch size and |cache| rise together. The mean offset
    is put back, so the values are still times. `steps` is how many steps each value
    stands for; None: one each.
    """
    grown = slope_us_per_1k_blocks * cache_blocks / 1_000
    offset = us - grown
    rest = offset.copy()
    for one in np.unique(group):
        rest[group == one] -= np.median(offset[group == one])
    return grown + rest + float(np.average(offset - rest, weights=steps))
