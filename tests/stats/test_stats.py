# SPDX-License-Identifier: Apache-2.0
"""Estimators of steps and rounds find what was put in, with intervals that hold it."""

from __future__ import annotations

from statistics import NormalDist

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvtax.stats import Estimate
from kvtax.stats.distribution import Distribution, f_quantile, t_quantile
from kvtax.stats.least_squares import (
    exponent,
    jackknifed_slopes,
    line_of_sums,
    share_explained_by_others,
)
from kvtax.stats.processes import RunSpread, look_level, mean_over_servers, student
from kvtax.stats.quantiles import (
    SessionDraws,
    median_of_passes,
    quantile,
    quantiles,
    slope_within_groups,
    weighted_quantiles,
)
from kvtax.stats.resampling import (
    added,
    chance_of_rise,
    difference,
    over_rounds,
    ratio,
)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    quantile=st.floats(0.01, 0.99),
)
def test_equal_weights_give_the_ordinary_quantile(values: list[float], quantile: float):
    array = np.array(values)
    (ours,) = weighted_quantiles(array, np.ones(len(array)), (quantile,))
    # The rank may round either way where quantile x n is a whole number.
    near = [q for q in (quantile - 1e-9, quantile, quantile + 1e-9) if 0 <= q <= 1]
    theirs = [np.quantile(array, q, method="inverted_cdf") for q in near]
    assert ours in theirs


@pytest.mark.parametrize(
    ("q", "value"), [(0.5, 2.0), (0.51, 3.0), (0.9, 4.0), (0.25, 1.0)]
)
def test_a_quantile_is_a_value_that_was_measured(q, value):
    series = pl.Series([4.0, None, 1.0, 3.0, 2.0])
    assert quantile(series, q) == value
    assert quantile(series.clear(), q) is None
    assert series.quantile(q, "equiprobable") == value


def test_p99_of_120_values_is_the_119th():
    (p50, p90, p99) = msgspec.structs.astuple(quantiles(pl.Series(range(1, 121))))
    assert (p50, p90, p99) == (60.0, 108.0, 119.0)
    assert quantiles(pl.Series([None, None], dtype=pl.Float64)) is None


def test_events_are_dealt_anew_within_their_server_only():
    """A server with many events, held at high levels alone, shows no rise."""
    server = np.repeat([0, 1], 12)
    x = np.concatenate([np.tile([0.0, 1.0, 2.0], 4), np.tile([8.0, 9.0, 10.0], 4)])
    events = np.where(server == 1, 5.0, 0.0)
    assert chance_of_rise(events, x, server) == 1.0
    # The same as one server: the events are at its upper levels.
    assert chance_of_rise(events, x, 0 * server) < 0.001


def test_events_at_the_highest_level_of_every_server_are_no_chance():
    server, x = np.repeat([0, 1, 2], 12), np.tile([0.0, 1.0, 2.0], 12)
    assert chance_of_rise(1.0 * (x == 2), x, server) < 0.001
    assert chance_of_rise(1.0 * (x == 0), x, server) > 0.99
    assert chance_of_rise(0.0 * x, x, server) == 1.0


def test_a_slope_within_groups_knows_no_offsets():
    x, group = np.tile([0.0, 1.0, 2.0], 3), np.repeat([4, 7, 9], 3)
    y = 3.0 * x + np.repeat([10.0, 500.0, -80.0], 3)
    assert slope_within_groups(x, y, np.ones(9), group) == pytest.approx(3.0)
    # A point that is far off moves no median.
    stolen = np.where((group == 4) & (x == 2), y + 900.0, y)
    assert slope_within_groups(x, stolen, np.ones(9), group) == pytest.approx(3.0)
    # But where it weighs most.
    heavy = np.where(group == 4, 100.0, 1.0)
    assert slope_within_groups(x, stolen, heavy, group) > 100
    assert slope_within_groups(0 * x, y, np.ones(9), group) is None


RNG = np.random.default_rng(1)
DRIFT = RNG.uniform(1, 3, 30)


def test_drift_of_the_machine_cancels_out_within_a_round():
    base_us = 300 * DRIFT
    low, high = ratio(1.05 * base_us, base_us).ci95
    assert (low, high) == pytest.approx((1.05, 1.05))
    low_us, high_us = difference(base_us + 2, base_us).ci95
    assert (low_us, high_us) == pytest.approx((2, 2))


@pytest.mark.slow
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


def test_an_interval_is_the_same_after_it_has_been_in_a_file():
    estimate = Estimate(1.25, (-1.0, 2.0))
    encoded = msgspec.json.encode(estimate)
    assert encoded == b'{"value":1.25,"ci95":[-1.0,2.0]}'
    assert msgspec.json.decode(encoded, type=Estimate) == estimate
    assert f"{estimate:+.1f}" == "+1.2 [-1.0, +2.0]"


PROBABILITY = st.floats(0.001, 0.9999)


@given(PROBABILITY, st.integers(1, 300))
def test_quantiles_of_t_are_those_of_scipy(probability: float, df: int):
    truth = stats.t.ppf(probability, df)
    assert t_quantile(probability, df) == pytest.approx(truth, rel=1e-4, abs=1e-4)


@given(PROBABILITY, st.integers(1, 20), st.integers(1, 300))
def test_quantiles_of_f_are_those_of_scipy(probability: float, df: int, below: int):
    truth = stats.f.ppf(probability, df, below)
    assert f_quantile(probability, df, below) == pytest.approx(
        truth, rel=1e-4, abs=1e-4
    )


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
    single, other = (student(0.0, 1.0, 100, seed) for seed in (1, 2))
    assert single.ci95 == pytest.approx((-1.984, 1.984), rel=1e-3)
    low, high = Distribution(0.0, single.draws - other.draws).ci95
    assert (low, high) == pytest.approx((-2.8, 2.8), rel=0.06)


def test_in_95_percent_of_runs_no_look_at_all_is_wrong():
    rng, looks = np.random.default_rng(4), 4
    z = (1 + look_level(looks)) / 2
    runs = rng.normal(size=(40_000, looks)).cumsum(axis=1)
    bound = t_quantile(z, 100_000) * np.sqrt(np.arange(1, looks + 1))
    assert (np.abs(runs) < bound).all(axis=1).mean() == pytest.approx(0.95, abs=0.004)


@pytest.mark.parametrize("looks", [0, 11])
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


@pytest.mark.parametrize(
    ("passes", "low", "high"),
    [
        # The k-th smallest and largest, where a binomial has at most 2.5 % beyond.
        (1, 1, 1),
        (5, 1, 5),
        (6, 1, 6),
        (8, 1, 8),
        (9, 2, 8),
        (11, 2, 10),
        (12, 3, 10),
        (20, 6, 15),
        (25, 8, 18),
    ],
)
def test_a_median_of_passes_lies_between_two_of_them_by_the_sign_test(
    passes, low, high
):
    values = np.random.default_rng(1).permutation(np.arange(1.0, passes + 1))
    assert median_of_passes(values) == Estimate((passes + 1) / 2, (low, high))


@pytest.mark.parametrize(
    ("looks", "z"),
    # Jennison and Turnbull (2000), table 2.1.
    list(
        enumerate(
            (1.960, 2.178, 2.289, 2.361, 2.413, 2.453, 2.485, 2.512, 2.535, 2.555), 1
        )
    ),
)
def test_a_run_that_looks_again_asks_for_pococks_level(looks, z):
    assert look_level(looks) == pytest.approx(2 * NormalDist().cdf(z) - 1)


@pytest.mark.parametrize(
    ("degrees", "runs", "others", "reach"),
    [
        # 0.1 * sqrt(1 / 2 + 1 / 3) * 2.7764.
        (4, 2, 3, 0.25345),
        (1, 1, 1, 1.79693),
        (100, 4, 4, 0.1 * 0.5**0.5 * 1.98397),
    ],
)
def test_equal_arms_reach_as_far_as_students_t_of_their_runs(
    degrees, runs, others, reach
):
    assert RunSpread(0.1, degrees).reach(runs, others) == pytest.approx(reach, rel=1e-3)


def test_offsets_of_runs_are_students_t_and_shrink_with_more_runs():
    spread = RunSpread(0.1, 4)
    single, four = spread.offsets("a", 1), spread.offsets("a", 4)
    assert single == pytest.approx(2 * four)
    edges = np.quantile(single, (0.025, 0.5, 0.975))
    assert edges == pytest.approx([-0.27764, 0, 0.27764], abs=0.01)
    # Arms are drawn apart, around one common width.
    other = spread.offsets("b", 1)
    assert abs(np.corrcoef(single, other)[0, 1]) < 0.05
    assert np.corrcoef(abs(single), abs(other))[0, 1] > 0.2


def test_an_interval_is_between_percentiles_of_its_draws():
    of = Distribution(50.0, np.arange(101.0))
    assert of.ci95 == pytest.approx((2.5, 97.5))
    assert of.interval(0.8) == pytest.approx((10.0, 90.0))
    assert Estimate.of(of, 3) == Estimate(50.0, (2.5, 97.5))
    unknown = Distribution(1.23456, np.full(9, np.nan))
    assert Estimate.of(unknown, 3) == Estimate(1.235)


@pytest.mark.parametrize(
    ("weights", "quantiles", "expected"),
    [
        # Of 10, 20, 30 and 40.
        ([1, 1, 1, 1], (0.25, 0.5, 0.51, 1.0), [10, 20, 30, 40]),
        ([7, 1, 1, 1], (0.5, 0.7, 0.75, 0.9), [10, 10, 20, 30]),
        ([0, 0, 1, 1], (0.0, 0.1, 0.5, 0.6), [10, 30, 30, 40]),
    ],
)
def test_a_weighted_quantile_is_where_the_weight_reaches_it(
    weights, quantiles, expected
):
    values, order = np.array([30.0, 10.0, 40.0, 20.0]), [2, 0, 3, 1]
    own = np.array(weights, float)[order]
    assert weighted_quantiles(values, own, quantiles) == expected


@pytest.mark.parametrize(
    ("requests", "sessions", "stated", "known"),
    [
        (9, 9, {"p50": 5.0}, True),
        (10, 8, {"p50": 5.0, "p90": 9.0}, True),
        (99, 8, {"p50": 50.0, "p90": 90.0}, True),
        (100, 8, {"p50": 50.0, "p90": 90.0, "p99": 99.0}, True),
        (100, 7, {"p50": 50.0, "p90": 90.0, "p99": 99.0}, False),
    ],
)
def test_a_quantile_needs_requests_beyond_it_and_an_interval_eight_sessions(
    requests, sessions, stated, known
):
    names = pl.Series([f"s{n % sessions}" for n in range(requests)])
    values = pl.Series([float(n) for n in range(1, requests + 1)])
    estimate = SessionDraws(names).quantiles(values, names)
    assert {name: of.value for name, of in estimate.items() if of} == stated
    assert all(
        bool(np.isfinite(of.draws).all()) == known for of in estimate.values() if of
    )


def test_sessions_are_drawn_whole_and_alike_for_all_arms():
    """Five fast and five slow sessions: a draw's median is that of its majority."""
    names = pl.Series([f"s{n}" for n in range(10) for _ in range(4)])
    values = pl.Series([1.0 if n < 20 else 9.0 for n in range(40)])
    draws = SessionDraws(names)
    assert draws.counts.shape == (500, 10)
    assert (draws.counts.sum(axis=1) == 10).all()
    estimate = draws.quantiles(values, names)["p50"].draws
    slow = draws.counts[:, 5:].sum(axis=1)
    assert ((estimate == 9.0) == (slow > 5)).all()
    twice = draws.quantiles(2 * values, names)["p50"].draws
    assert twice.tolist() == (2 * estimate).tolist()


def test_rounds_of_steps_count_with_their_lower_quartiles():
    base = np.array([[1.0, 2.0, 3.0, 4.0, 99.0]] * 12)
    # Quartiles 2 and 7, whatever else disturbs a step.
    times = np.array([[6.0, 7.0, 80.0, 90.0, 900.0]] * 12)
    estimate = added(times, base)
    assert (estimate.value, estimate.ci95) == (5.0, (5.0, 5.0))


def test_an_interval_over_rounds_is_that_of_drawn_rounds():
    rounds = np.arange(1.0, 102.0)
    estimate = over_rounds(rounds)
    assert estimate.value == 51.0
    assert estimate.draws.shape == (1_000,)
    # The error of a median of 101 uniform rounds is about 101 / (2 sqrt(101)).
    assert estimate.ci95 == pytest.approx((51 - 9.85, 51 + 9.85), abs=2.0)
    mean = over_rounds(rounds, lambda drawn: float(drawn.mean()))
    assert np.std(mean.draws) == pytest.approx(29.15 / 101**0.5, rel=0.1)


RUNS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0, 2.5])
def test_an_exponent_is_that_of_a_power_with_an_offset(power):
    assert exponent(RUNS, 7 + 3 * RUNS**power) == pytest.approx(power, abs=0.011)
    assert exponent(RUNS, 7 - 3 * RUNS**power) == pytest.approx(power, abs=0.011)


def test_a_line_of_sums_is_that_of_the_points():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 5.0, 9.0])
    sums = np.array([4.0, x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])
    slope, intercept = line_of_sums(sums)
    # 2.2 and -0.5 by hand.
    assert (slope, intercept) == pytest.approx((2.2, -0.5))
    still = line_of_sums(np.array([4.0, 8.0, 10.0, 16.0, 20.0]))
    assert np.isnan(still).all()


def test_the_share_that_other_axes_explain():
    x, z = np.array([0.0, 0, 1, 1]), np.array([0.0, 1, 0, 1])
    apart = share_explained_by_others(np.column_stack([x, z]))
    assert apart == pytest.approx([0.0, 0.0])
    same = share_explained_by_others(np.column_stack([x, 5 - 2 * x]))
    assert same == pytest.approx([1.0, 1.0])
    # Correlation 0.5, and so a quarter.
    half = np.array(
        [[0.0, 0], [1, 1], [2, 0], [1, -1], [2, 2], [0, -2], [1, 0], [1, 0]]
    )
    r = np.corrcoef(half.T)[0, 1]
    assert share_explained_by_others(half) == pytest.approx([r**2, r**2])


def test_slopes_along_two_axes_and_their_jackknife():
    """Noise-free slopes have no width; one bad stretch in twenty widens them."""
    rng = np.random.default_rng(6)
    axes = rng.normal(size=(400, 2))
    exact = (5 + axes @ [3.0, -2.0])[:, None]
    ((first, second),) = jackknifed_slopes(axes, exact)
    assert (first.value, second.value) == pytest.approx((3.0, -2.0))
    assert first.ci95 == pytest.approx((3.0, 3.0))
    noise = exact + rng.normal(size=(400, 1))
    ((noisy, _),) = jackknifed_slopes(axes, noise)
    # The error of a slope is 1 / sqrt(400), and the interval as wide or wider.
    assert 0.06 < (noisy.high - noisy.low) / 2 < 0.25
    assert noisy.low < 3.0 < noisy.high
