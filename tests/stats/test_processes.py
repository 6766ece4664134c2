# SPDX-License-Identifier: Apache-2.0
"""Estimates from a few servers and runs are as wide as they say."""

from __future__ import annotations

import numpy as np
import pytest

from kvtax.stats import Estimate
from kvtax.stats.distribution import f_quantile, t_quantile
from kvtax.stats.processes import (
    POCOCK,
    RunSpread,
    look_level,
    mean_over_servers,
    student,
)


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


@pytest.mark.parametrize(("df", "t"), [(1, 12.7062), (4, 2.7764), (24, 2.0639)])
def test_a_value_with_an_error_has_the_interval_of_students_t(df: int, t: float):
    low, high = student(100.0, 3.0, df, seed=1).ci95
    assert (low, high) == pytest.approx((100 - 3 * t, 100 + 3 * t), rel=2e-3)
    # Several looks at a run make it wider.
    wide = student(100.0, 3.0, df, seed=1, level=look_level(3)).ci95
    assert wide[0] < low and high < wide[1]
    reach = 3 * t_quantile((1 + look_level(3)) / 2, df)
    assert wide == pytest.approx((100 - reach, 100 + reach), rel=2e-3)


def test_draws_of_two_estimates_subtract_as_independent_ones():
    one, other = (student(0.0, 1.0, 100, seed) for seed in (1, 2))
    assert one.ci95 == pytest.approx((-1.984, 1.984), rel=1e-3)
    low, high = one.minus(other).ci95
    assert (low, high) == pytest.approx((-2.8, 2.8), rel=0.06)


def test_in_95_percent_of_runs_no_look_at_all_is_wrong():
    rng, looks = np.random.default_rng(4), 4
    z = (1 + look_level(looks)) / 2
    runs = rng.normal(size=(40_000, looks)).cumsum(axis=1)
    bound = t_quantile(z, 100_000) * np.sqrt(np.arange(1, looks + 1))
    assert (np.abs(runs) < bound).all(axis=1).mean() == pytest.approx(0.95, abs=0.004)


@pytest.mark.parametrize("looks", [0, len(POCOCK) + 1])
def test_no_more_looks_than_the_table_has(looks: int):
    with pytest.raises(ValueError, match="looks"):
        look_level(looks)


def test_the_mean_over_servers_has_an_interval_from_two_on():
    assert mean_over_servers([5.0]) == Estimate(5.0)
    low, high = mean_over_servers([10.0, 14.0]).ci95
    assert (low, high) == pytest.approx((12 - 2 * 12.706, 12 + 2 * 12.706), rel=1e-3)


def test_equal_arms_lie_within_their_reach_in_95_percent_of_experiments():
    rng, within, experiments = np.random.default_rng(5), 0, 1_000
    for _ in range(experiments):
        arms = rng.normal(0, 0.2, (3, 3))
        reach = RunSpread.of(list(arms)).reach(3, 3)
        within += abs(arms[0].mean() - arms[1].mean()) < reach
    assert within / experiments == pytest.approx(0.95, abs=0.02)


def test_a_spread_needs_an_arm_with_two_runs_and_no_run_without_a_level():
    once, twice = np.zeros(1), np.array([0.0, 0.2])
    assert RunSpread.of([once, once]) is None
    assert RunSpread.of([twice, np.array([0.0, -np.inf])]) is None
    spread = RunSpread.of([once, twice])
    assert (spread.log_sd, spread.degrees) == (pytest.approx(0.1414, rel=1e-3), 1)
