# SPDX-License-Identifier: Apache-2.0
"""An exact test whether something rare happens more often at higher levels."""

from __future__ import annotations

from math import comb

from kvtax.stats.distribution import Ints


def rises(counts: Ints, alpha: float) -> bool:
    """Return whether holds with an event are more frequent above some level.

    `counts` (passes, levels) are the events of each hold. A hold counts once, however
    many events it has: a disturbance of the machine makes several in a row. For each
    division of the levels into lower and upper ones, Fisher's exact test; all at once
    (Bonferroni).
    """
    hit = counts > 0
    passes, levels = hit.shape
    holds, hits = hit.size, int(hit.sum())
    return any(
        _upper_tail(int(hit[:, first:].sum()), passes * (levels - first), hits, holds)
        < alpha / (levels - 1)
        for first in range(1, levels)
    )


def _upper_tail(found: int, upper: int, hits: int, holds: int) -> float:
    """Return the chance that at least `found` of the `hits` are among the `upper`."""
    ways = sum(
        comb(upper, n) * comb(holds - upper, hits - n)
        for n in range(found, min(hits, upper) + 1)
    )
    return ways / comb(holds, hits)
