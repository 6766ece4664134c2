# SPDX-License-Identifier: Apache-2.0
"""An interval over a few processes holds what they differ by, as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.interval import stated
from lab.stats.processes import (
    Repeats,
    Spread,
    between_spread,
    look_level,
    over_processes,
)
from lab.stats.t_and_f import f_quantile, t_quantile

pytestmark = pytest.mark.slow


def made_up(
    rng: np.random.Generator, count: int, between_us: float, scale: float = 1.0
) -> Repeats:
    """Repeats around 0, each with 1 us of noise of its own, all of it `scale` times."""
    values = rng.normal(0, between_us, count) + rng.normal(0, 1, count)
    return Repeats(values * scale, np.full(count, scale**2), 10 * scale)


@pytest.mark.parametrize(
    ("df", "probability", "t"),
    [(1, 0.975, 12.7062), (2, 0.995, 9.9248), (4, 0.975, 2.7764), (100, 0.025, -1.984)],
)
def test_quantiles_of_t_are_those_of_the_tables(df: int, probability: float, t: float):
    assert t_quantile(probability, df) == pytest.approx(t, rel=1e-4)


@pytest.mark.parametrize(
    ("df", "below", "f"), [(1, 12, 4.7472), (2, 24, 3.4028), (4, 48, 2.5652)]
)
def test_quantiles_of_f_are_those_of_the_tables(df: int, below: int, f: float):
    assert f_quantile(0.95, df, below) == pytest.approx(f, rel=1e-4)


def test_two_repeats_of_processes_that_differ_are_covered_as_often_as_promised():
    """The block bootstrap held the truth in 52 % of such runs."""
    rng, runs, held = np.random.default_rng(1), 1_000, 0
    for run in range(runs):
        groups = [made_up(rng, 2, 40.0) for _ in range(12)]
        low, high = over_processes(groups[0], between_spread(groups), run).ci95
        held += low <= 0 <= high
    assert held / runs >= 0.93


@pytest.mark.parametrize("between_us", [0.5, 1.0, 3.0])
def test_the_spread_between_processes_is_found_whatever_the_level(between_us: float):
    rng = np.random.default_rng(2)
    shares = [
        between_spread(
            made_up(rng, int(rng.integers(2, 6)), between_us, scale)
            for scale in (0.1, 1, 1, 7, 7, 7, 50, 50, 50, 50, 50, 50)
        ).share
        for _ in range(400)
    ]
    assert np.sqrt(np.mean(np.square(shares))) == pytest.approx(
        between_us / 10, rel=0.1
    )


def test_noise_within_the_repeats_is_not_taken_for_a_difference_between_them():
    rng = np.random.default_rng(3)
    found = [between_spread(made_up(rng, 5, 0.0) for _ in range(12)) for _ in range(50)]
    # The noise within is a tenth of the scale.
    assert np.mean([spread.share for spread in found]) < 0.03


def test_one_config_alone_with_two_repeats_has_an_honest_t_with_one_degree():
    alone = Repeats(np.array([10.0, 14.0]), np.zeros(2), 12.0)
    low, high = over_processes(alone, between_spread([alone]), 1).ci95
    assert (low, high) == pytest.approx((12 - 2 * 12.706, 12 + 2 * 12.706), rel=1e-3)


def test_a_config_far_noisier_than_the_others_stands_alone():
    others = [
        Repeats(np.array([99.0, 101.0, 100.0]), np.full(3, 0.1), 100.0)
        for _ in range(11)
    ]
    wild = Repeats(np.array([60.0, 100.0, 140.0]), np.full(3, 0.1), 100.0)
    spread = between_spread([*others, wild])
    low, high = over_processes(wild, spread, 1).ci95
    half = 4.3027 * 40 / np.sqrt(3)
    assert (low, high) == pytest.approx((100 - half, 100 + half), abs=0.1)


def test_a_single_repeat_takes_the_spread_of_the_others_or_has_no_interval():
    single = Repeats(np.array([100.0]), np.array([1.0]), 100.0)
    assert stated(over_processes(single, between_spread([single]), 1), 1) == {
        "value": 100.0,
        "ci95": None,
    }
    others = [Repeats(np.array([95.0, 105.0]), np.ones(2), 100.0) for _ in range(6)]
    low, high = over_processes(single, between_spread([single, *others]), 1).ci95
    assert low < 90 and high > 110


def test_draws_of_two_estimates_subtract_as_independent_ones():
    known = Spread(between=0.0, error=1e-9, df=100)
    one, other = (
        over_processes(Repeats(np.zeros(4), np.full(4, 4.0), 1.0), known, seed)
        for seed in (1, 2)
    )
    assert one.ci95 == pytest.approx((-1.984, 1.984), rel=1e-3)
    low, high = one.minus(other).ci95
    assert (low, high) == pytest.approx((-2.8, 2.8), rel=0.06)
    assert one.interval(0.99) == pytest.approx((-2.626, 2.626), rel=1e-3)


def test_in_95_percent_of_runs_no_look_at_all_is_wrong():
    rng, looks = np.random.default_rng(4), 4
    z = (1 + look_level(looks)) / 2
    runs = rng.normal(size=(40_000, looks)).cumsum(axis=1)
    bound = t_quantile(z, 100_000) * np.sqrt(np.arange(1, looks + 1))
    assert (np.abs(runs) < bound).all(axis=1).mean() == pytest.approx(0.95, abs=0.004)


@pytest.mark.parametrize(
    ("values", "variances", "scale"), [([], [], 1), ([1, 2], [1], 1), ([1], [1], 0)]
)
def test_repeats_that_make_no_sense_are_refused(values, variances, scale):
    with pytest.raises(ValueError, match=r"repeat|scale"):
        Repeats(np.array(values), np.array(variances), scale)


@pytest.mark.parametrize("looks", [0, 11])
def test_no_more_looks_than_the_table_has(looks: int):
    with pytest.raises(ValueError, match="looks"):
        look_level(looks)
