# SPDX-License-Identifier: Apache-2.0
"""Bootstraps over blocks of steps and rounds of variants, permutations of holds.

Blocks (Kunsch 1989; Davison and Hinkley 1997, 8.2): neighbouring steps resemble each
other, so whole blocks of them are drawn. With several repeats there are two stages,
repeats first and then blocks within each, so a difference between repeats widens the
interval.

Rounds: variants are measured in turn, once per round, in random order. The machine
drifts from round to round far more than within one, so a round is drawn whole
(percentile bootstrap: Efron and Tibshirani 1993, 13.3). Variants are compared within a
round, and so drift cancels out. Rounds of one machine do not show how another machine
or day differs.

Holds: rare events come in bursts, so whole holds are dealt anew, each within its server
(a permutation test: Davison and Hinkley 1997, 4.3).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from kvtax.stats.distribution import SEED, Distribution, Floats, Ints

# An interval from fewer blocks is too narrow; the pairs grow with the square.
BLOCKS = 40
MIN_STEPS_PER_BLOCK = 20
ROUND_REPLICATES = 1_000
PERMUTATIONS = 20_000


def add_blocks(
    steps: pl.DataFrame, min_steps: int = MIN_STEPS_PER_BLOCK
) -> pl.DataFrame:
    """Add a column `block`, from 0 on, to `steps` in order, grouped by repeat."""
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
    """Find the repeat of each block, (blocks,), of steps that add_blocks numbered."""
    repeats = blocked.group_by("block").agg(pl.col("repeat").first()).sort("block")
    return repeats["repeat"].cast(pl.Int64).to_numpy()


def resample_blocks(
    repeat_of_block: Ints, replicates: int, rng: np.random.Generator
) -> Floats:
    """Draw blocks: how often each is in each replicate, (replicates, blocks)."""
    repeats, sizes = np.unique(repeat_of_block, return_counts=True)
    share = np.full(len(repeats), 1 / len(repeats))
    drawn = rng.multinomial(len(repeats), share, size=replicates)
    counts = np.zeros((replicates, len(repeat_of_block)))
    for index, (repeat, size) in enumerate(zip(repeats, sizes, strict=True)):
        within = rng.multinomial(drawn[:, index] * size, np.full(size, 1 / size))
        counts[:, repeat_of_block == repeat] = within
    return counts


def over_rounds(
    rounds: Floats, statistic: Callable[[Floats], float] = np.median
) -> Distribution:
    """`statistic` of `rounds`, (rounds,) or (rounds, steps), with rounds resampled.

    A round is drawn whole, with all its steps. Raises ValueError if there is none.
    """
    count = len(rounds)
    if count == 0:
        raise ValueError("no rounds")
    drawn = np.random.default_rng(SEED).integers(count, size=(ROUND_REPLICATES, count))
    if statistic is np.median and rounds.ndim == 1:
        draws = np.median(rounds[drawn], axis=1)
    else:
        draws = np.array([statistic(rounds[index]) for index in drawn], float)
    return Distribution(float(statistic(rounds)), draws)


def difference(values: Floats, base: Floats) -> Distribution:
    """Median over the rounds of `values` minus `base`, both (rounds,)."""
    return over_rounds(values - base)


def ratio(values: Floats, base: Floats) -> Distribution:
    """Median over the rounds of `values` over `base`, both (rounds,), base not 0."""
    return over_rounds(values / base)


def added(times: Floats, base: Floats) -> Distribution:
    """Compute how much longer `times` are than `base`, both (rounds, steps).

    A round counts with its lower quartile: what disturbs a step only ever adds to it.
    """
    return difference(*(np.quantile(of, 0.25, axis=1) for of in (times, base)))


def chance_of_rise(events: Floats, x: Floats, server: Ints) -> float:
    """Compute how often counts that are dealt anew rise with `x` as much or more.

    All are of the same holds (holds,).
    """
    if not events.any():
        return 1.0
    score = x - x.mean()
    rise = float(events @ score)
    rng = np.random.default_rng(SEED)
    dealt = np.zeros(PERMUTATIONS)
    for one in np.unique(server):
        own = np.flatnonzero(server == one)
        order = rng.random((PERMUTATIONS, len(own))).argsort(axis=1)
        dealt += events[own][order] @ score[own]
    as_much = np.count_nonzero(dealt >= rise - 1e-9 * abs(rise))
    return (1 + as_much) / (1 + PERMUTATIONS)
