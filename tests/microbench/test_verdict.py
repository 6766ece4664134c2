# SPDX-License-Identifier: Apache-2.0
"""What an interval and a reset check add up to."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.estimate import Estimate
from microbench.analysis.metrics import MARGIN_US_PER_1K_BLOCKS, METRICS, PARTS
from microbench.analysis.verdict import (
    metric_verdict,
    overall_verdict,
)


def estimate(low: float, high: float) -> Estimate:
    """One whose 95 % interval is about (low, high)."""
    middle, half = (low + high) / 2, (high - low) / 2
    return Estimate(middle, middle + half / 0.95 * np.linspace(-1, 1, 10_001))


def verdict(slope, fall, slope_floor: float = 0.0, fall_floor: float = 0.0) -> str:
    intervals = (of and estimate(*of) for of in (slope, fall))
    return metric_verdict(*intervals, slope_floor, fall_floor)


@pytest.mark.parametrize(
    ("fall", "found"),
    [
        ((-0.5, 0.5), "flat"),
        ((0.5, 1.5), "flat"),
        # Growth is excluded; how far the cost may fall does not matter.
        ((-9.0, 1.5), "flat"),
        ((-1.0, 3.0), "inconclusive"),
        ((1.0, 9.0), "inconclusive"),
        # A clear rise at a reset means that something else has changed.
        ((-9.0, -3.0), "inconclusive"),
    ],
)
def test_flat_means_that_growth_beyond_the_margin_is_excluded(fall, found):
    assert verdict((-1.0, 1.0), fall) == found


def test_nothing_is_flat_within_what_two_runs_of_the_same_thing_differ_by():
    assert verdict((-1.0, 1.0), (-1.0, 1.0), fall_floor=5.0) == "inconclusive"


def test_a_cost_that_may_drift_far_is_not_flat():
    assert verdict((-4.0, 5.0), (-1.0, 1.0)) == "flat"
    assert verdict((-4.0, 9.0), (-1.0, 1.0)) == "inconclusive"


@pytest.mark.parametrize(
    ("slope", "fall", "found"),
    [
        ((40.0, 50.0), (30.0, 60.0), "grows"),
        # One of them shown, the other agrees.
        ((40.0, 50.0), (1.0, 60.0), "grows"),
        ((-5.0, 70.0), (30.0, 40.0), "grows"),
        # Something else went up, too, but what falls at a reset came from the cache.
        ((40.0, 50.0), (15.0, 21.0), "grows"),
        # It did not fall: something else went up.
        ((40.0, 50.0), (-5.0, 5.0), "drifts"),
        # Not to see it fall is not to see it stay.
        ((40.0, 50.0), (-10.0, 40.0), "inconclusive"),
        # It fell, but had not risen.
        ((-9.0, 1.0), (30.0, 40.0), "inconclusive"),
        ((-50.0, 90.0), (-40.0, 60.0), "inconclusive"),
    ],
)
def test_growth_rises_with_cache_and_falls_at_the_reset(slope, fall, found):
    assert verdict(slope, fall) == found


def test_growth_is_more_than_two_runs_of_the_same_thing_differ_by():
    grown = (30.0, 40.0), (30.0, 40.0)
    assert verdict(*grown) == "grows"
    assert verdict(*grown, slope_floor=60.0, fall_floor=60.0) == "inconclusive"


@pytest.mark.parametrize("known", [(None, (0.0, 1.0)), ((0.0, 1.0), None)])
def test_half_the_evidence_is_no_verdict(known):
    assert verdict(*known) == "inconclusive"


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
