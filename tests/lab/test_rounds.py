# SPDX-License-Identifier: Apache-2.0
"""Rounds are resampled whole, and variants are compared within a round."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.rounds import difference, over_rounds, ratio

RNG = np.random.default_rng(1)
DRIFT = RNG.uniform(1, 3, 30)


def test_drift_of_the_machine_cancels_out_within_a_round():
    base_us = 300 * DRIFT
    low, high = ratio(1.05 * base_us, base_us).ci95
    assert (low, high) == pytest.approx((1.05, 1.05))
    low_us, high_us = difference(base_us + 2, base_us).ci95
    assert (low_us, high_us) == pytest.approx((2, 2))


def test_an_interval_is_as_wide_as_the_rounds_differ_and_not_their_steps():
    def median(steps):
        return float(np.quantile(steps, 0.5))

    steps = np.tile(np.arange(100.0), (20, 1))
    alike = over_rounds(steps, median)
    assert alike.value == alike.ci95[0] == alike.ci95[1] == 49.5
    drifting = over_rounds(steps + np.arange(20.0)[:, None] * 10, median)
    low, high = drifting.ci95
    assert low < 120 < drifting.value < 160 < high


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for _ in range(60):
        low, high = over_rounds(RNG.normal(5, 1, 30)).ci95
        held += low <= 5 <= high
    assert held >= 50


def test_the_same_rounds_give_the_same_interval():
    assert over_rounds(DRIFT).ci95 == over_rounds(DRIFT).ci95


def test_without_rounds_there_is_no_estimate():
    with pytest.raises(ValueError, match="no rounds"):
        over_rounds(np.zeros(0))
