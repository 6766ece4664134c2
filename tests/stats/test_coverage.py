# SPDX-License-Identifier: Apache-2.0
"""Levels that were held are known as well as their intervals say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.coverage import FALSE, KINDS, LINEAR, X_1K, draw, row, shares
from kvtax.stats.held import fit

pytestmark = pytest.mark.slow


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("name", ["normal", "t5", "autocorrelated"])
def test_made_up_noise_has_the_variance_that_its_name_says(name, rng):
    values = np.concatenate([KINDS[name].noise(rng, 1_000) for _ in range(200)])
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.std() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("name", KINDS)
def test_made_up_holds_rise_as_far_as_they_are_to(name, rng):
    found = [fit(draw(KINDS[name], 2, LINEAR, rng)[0]) for _ in range(40)]
    slopes = [one.slope()[0] for one in found]
    assert np.mean(slopes) == pytest.approx(LINEAR[-1] / X_1K[-1], rel=0.1)


# Of what servers differ by, one server knows nothing.
UNKNOWN = "servers differ"


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {UNKNOWN}))
def test_intervals_hold_the_truth_and_words_are_seldom_false(name, rng):
    cell = shares(KINDS[name], 2, 60, rng)
    # 240 runs are as far off as 4 points.
    assert min(cell.slope, cell.pairs) > 0.90
    assert max(cell.false) < 0.12, dict(zip(FALSE, cell.false, strict=True))
    assert row(name, 2, cell)[:2] == [name, "2"]


def test_where_servers_differ_the_table_says_that_intervals_are_too_narrow(rng):
    cell = shares(KINDS[UNKNOWN], 2, 30, rng)
    assert cell.slope < 0.90
    assert any("misses" in word for word in row(UNKNOWN, 2, cell))
