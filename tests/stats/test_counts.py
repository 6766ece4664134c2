# SPDX-License-Identifier: Apache-2.0
"""Rare events are growth if higher levels have more of them than by chance."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import fisher_exact

from kvtax.stats.counts import _upper_tail, rises

PASSES = 9


def counts(*by_level: int) -> np.ndarray:
    """One event in each of the first so many passes, by level."""
    return np.array([[number < n for n in by_level] for number in range(PASSES)], int)


@pytest.mark.parametrize(
    ("by_level", "grows"),
    [
        ((0, 0, 0, 6, 7), True),
        ((0, 0, 0, 0, 6), True),
        ((6, 7, 0, 0, 0), False),
        ((3, 4, 2, 3, 4), False),
        ((9, 9, 9, 9, 9), False),
        ((0, 0, 0, 0, 0), False),
        ((0, 0, 0, 1, 2), False),
    ],
)
def test_what_is_more_frequent_at_higher_levels_grows(by_level, grows):
    assert rises(counts(*by_level), 0.001) == grows


def test_a_burst_within_one_hold_is_one_event():
    burst = counts(0, 0, 0, 0, 1) * 50
    assert not rises(burst, 0.001)


def test_the_chance_is_that_of_fishers_exact_test():
    rng = np.random.default_rng(5)
    for _ in range(100):
        upper, lower = rng.integers(1, 30, 2)
        hit = int(rng.integers(0, upper + 1)), int(rng.integers(0, lower + 1))
        table = [[hit[0], upper - hit[0]], [hit[1], lower - hit[1]]]
        expected = fisher_exact(table, alternative="greater").pvalue
        chance = _upper_tail(hit[0], int(upper), sum(hit), int(upper + lower))
        assert chance == pytest.approx(expected)


def test_noise_is_rarely_called_growth():
    rng = np.random.default_rng(6)
    assert sum(rises(rng.poisson(0.5, (PASSES, 5)), 0.001) for _ in range(2_000)) <= 8
