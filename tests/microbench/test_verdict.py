# SPDX-License-Identifier: Apache-2.0
"""What an interval and a reset check add up to."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.estimate import Estimate
from microbench.analysis.metrics import METRICS, PARTS
from microbench.analysis.verdict import (
    MARGIN_US_PER_1K_BLOCKS,
    metric_verdict,
    overall_verdict,
)

FELL = {"fell": True, "stayed": False}
STAYED = {"fell": False, "stayed": True}
UNSURE = {"fell": False, "stayed": False}


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
        # Not to see it fall is not to see it stay.
        (UNSURE, 0.0, "inconclusive"),
        (None, 0.0, "inconclusive"),
        # Two runs of the same config differ by more than that.
        (FELL, 60.0, "inconclusive"),
    ],
)
def test_growth_needs_the_reset_and_more_than_the_noise_floor(check, floor, verdict):
    assert metric_verdict(slope(40.0, 50.0), check, floor) == verdict


def test_no_slope_is_no_verdict():
    assert metric_verdict(None, FELL, floor=0.0) == "inconclusive"


FLAT = dict.fromkeys(METRICS, "flat")


@pytest.mark.parametrize("part", PARTS)
def test_flat_needs_every_part_to_be_flat(part):
    assert overall_verdict(FLAT) == "flat"
    for verdict in ("grows", "drifts", "inconclusive"):
        assert overall_verdict(FLAT | {part: verdict}) == verdict


@pytest.mark.parametrize("whole", ["schedule", "overhead"])
def test_a_whole_that_grows_convicts_and_a_noisy_one_does_not_decide(whole):
    assert overall_verdict(FLAT | {whole: "grows"}) == "grows"
    for verdict in ("drifts", "inconclusive"):
        assert overall_verdict(FLAT | {whole: verdict}) == "flat"


def test_a_step_that_grows_vetoes_flat():
    # It holds what nobody has timed, too, and the model.
    assert overall_verdict(FLAT | {"step": "grows"}) == "inconclusive"
    assert overall_verdict(FLAT | {"step": "drifts"}) == "flat"


@pytest.mark.parametrize(
    ("schedule", "overhead", "verdict"),
    [
        ("flat", "flat", "flat"),
        ("flat", "grows", "grows"),
        ("flat", "drifts", "drifts"),
        ("flat", "inconclusive", "inconclusive"),
    ],
)
def test_records_without_parts_are_judged_by_scheduler_and_connector(
    schedule, overhead, verdict
):
    of = {"schedule": schedule, "overhead": overhead, "step": "inconclusive"}
    assert overall_verdict(of) == verdict


def test_the_margin_is_small_beside_a_real_forward():
    assert MARGIN_US_PER_1K_BLOCKS * 17.5 < 0.01 * 7_000
