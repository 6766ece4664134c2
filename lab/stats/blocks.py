# SPDX-License-Identifier: Apache-2.0
"""Blocks of neighbouring steps, and how to resample them.

Block bootstrap (Kunsch 1989; Davison and Hinkley 1997, 8.2): neighbouring steps
resemble each other, so whole blocks of them are drawn. With several repeats it has two
stages, repeats first and then blocks within each, so a difference between repeats
widens the interval.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from lab.stats.estimate import Floats, Ints

# An interval from fewer blocks is too narrow; the pairs grow with the square.
BLOCKS = 40
MIN_STEPS_PER_BLOCK = 20


def add_blocks(
    steps: pl.DataFrame, min_steps: int = MIN_STEPS_PER_BLOCK
) -> pl.DataFrame:
    """`steps` (grouped by repeat, in step order) with a column `block`, from 0 on."""
    counts = steps["repeat"].rle().struct.unnest()["len"].to_list()
    first, parts = 0, []
    for count in counts:
        blocks = int(np.clip(count // min_steps, 1, BLOCKS))
        index = np.arange(count, dtype=np.int64) * blocks // max(count, 1)
        parts.append((index + first).astype(np.int32))
        first += blocks
    block = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return steps.with_columns(pl.Series("block", block))


def repeat_of_block(blocked: pl.DataFrame) -> Ints:
    """The repeat of each block, (blocks,), of steps that add_blocks has numbered."""
    repeats = blocked.group_by("block").agg(pl.col("repeat").first()).sort("block")
    return repeats["repeat"].cast(pl.Int64).to_numpy()


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
