# SPDX-License-Identifier: Apache-2.0
"""Costs in few steps: steps that took long, counted at each level of |cache|.

A mean over steps cannot be known where a few of them take most of the time: stalls of
the machine do, too. But those come at every level alike. So long steps are counted; if
the counts rise with the level, more than by chance, the cost grows.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from kvtax.records.per_config import RareSteps
from kvtax.stats.distribution import SEED, Floats, Ints
from kvtax.verdict.holds import LONG_US

CHANCE = 0.001
PERMUTATIONS = 20_000


def rare_steps(holds: pl.DataFrame) -> RareSteps | None:
    """Count the long steps of a table of holds by level; None without any holds."""
    own = holds.filter(pl.col("steps").is_not_null())
    if not own.height:
        return None
    levels = own.group_by("level").agg(pl.col("long", "steps").sum()).sort("level")
    return RareSteps(
        longer_by_us=LONG_US,
        steps=levels["steps"].cast(pl.Int64).to_list(),
        long=levels["long"].cast(pl.Int64).to_list(),
        chance=_chance(
            own["long"].cast(pl.Float64).to_numpy(),
            own["cache_blocks"].cast(pl.Float64).to_numpy(),
            own["repeat"].cast(pl.Int64).to_numpy(),
        ),
    )


def _chance(long: Floats, blocks: Floats, server: Ints) -> float:
    """Compute how often counts that are dealt anew rise with |cache| as much or more.

    Whole holds are dealt, each within its server: stalls come in bursts.
    """
    if not long.any():
        return 1.0
    score = blocks - blocks.mean()
    rise = float(long @ score)
    rng = np.random.default_rng(SEED)
    dealt = np.zeros(PERMUTATIONS)
    for one in np.unique(server):
        own = np.flatnonzero(server == one)
        order = rng.random((PERMUTATIONS, len(own))).argsort(axis=1)
        dealt += long[own][order] @ score[own]
    as_much = np.count_nonzero(dealt >= rise - 1e-9 * abs(rise))
    return (1 + as_much) / (1 + PERMUTATIONS)
