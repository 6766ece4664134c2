# SPDX-License-Identifier: Apache-2.0
"""What an interval and a reset check add up to."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.estimate import Estimate
from microbench.analysis.verdict import (
    MARGIN_US_PER_1K_BLOCKS,
    metric_verdict,
    overall_verdict,
)

FELL, STAYED = {"fell": True}, {"fell": False}


def slope(low: float, high: float) -> Estimate:
    """An estimate whose 95 % interval is about (low, high)."""
    return Estimate((low + high) / 2, np.linspace(low, high, 10_001))


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-0.5, 0.5), "flat"),
        ((0.5, 1.5), "flat"),
        # Growth is excluded; how far the cost may fall does not matter.
        ((-9.0, 1.5), "flat"),
        ((-1.0, 3.0), "inconclusive"),
        ((1.0, 9.0), "inconclusive"),
        # A clear fall means that something else has changed.
        ((-9.0, -3.0), "inconclusive"),
    ],
)
def test_flat_means_that_growth_beyond_the_margin_is_excluded(interval, verdict):
    assert metric_verdict(slope(*interval), STAYED, floor=0.0) == verdict


@pytest.mark.parametrize(
    ("check", "floor", "verdict"),
    [
        (FELL, 0.0, "grows"),
        (STAYED, 0.0, "drifts"),
        (None, 0.0, "inconclusive"),
        # Two runs of the same config differ by more than that.
        (FELL, 60.0, "inconclusive"),
    ],
)
def test_growth_needs_the_reset_and_more_than_the_noise_floor(check, floor, verdict):
    assert metric_verdict(slope(40.0, 50.0), check, floor) == verdict


def test_no_slope_is_no_verdict():
    assert metric_verdict(None, FELL, floor=0.0) == "inconclusive"


@pytest.mark.parametrize(
    ("schedule", "overhead", "step", "verdict"),
    [
        ("flat", "flat", "inconclusive", "flat"),
        ("flat", "flat", "drifts", "flat"),
        # A step holds what nobody has timed, too.
        ("flat", "flat", "grows", "inconclusive"),
        ("flat", "grows", "inconclusive", "grows"),
        ("flat", "drifts", "inconclusive", "drifts"),
        ("flat", "inconclusive", "flat", "inconclusive"),
    ],
)
def test_a_step_that_grows_is_never_flat_and_a_noisy_one_may_be(
    schedule, overhead, step, verdict
):
    of = {"schedule": schedule, "overhead": overhead, "step": step}
    assert overall_verdict(of) == verdict


def test_the_margin_is_small_beside_a_real_forward():
    assert MARGIN_US_PER_1K_BLOCKS * 17.5 < 0.01 * 7_000
