# SPDX-License-Identifier: Apache-2.0
"""Estimators of steps and rounds find what was put in, with intervals that hold it."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.stats import Estimate
from kvtax.stats.distribution import Distribution, f_quantile, t_quantile
from kvtax.stats.median_slope import make_cells, slope_us_per_1k_blocks
from kvtax.stats.processes import (
    POCOCK,
    RunSpread,
    look_level,
    mean_over_servers,
    student,
)
from kvtax.stats.quantiles import weighted_quantiles
from kvtax.stats.resampling import (
    add_blocks,
    difference,
    over_rounds,
    ratio,
    resample_blocks,
)
from kvtax.verdict.aims import Aim, aims_table, judge
from tests.microbench.synthetic import ar1, with_outliers

TIME = "schedule_us"


def growth(
    seed: int,
    slopes: tuple[float, ...],
    steps: int = 1_500,
    offsets: tuple[float, ...] = (0.0,),
    outliers: float = 0.03,
) -> pl.DataFrame:
    """Growth phases, one a slope; the batch size, 5 us each, grows with |cache|."""
    rng = np.random.default_rng(seed)
    tables = []
    for repeat, slope in enumerate(slopes):
        blocks = np.linspace(0, 16_000, steps)
        batch = np.clip(np.round(2 + blocks / 2_500 + rng.normal(0, 1.2, steps)), 1, 10)
        us = 40 + 5 * batch + slope * blocks / 1_000 + ar1(rng, steps, 0.9, 4)
        us += rng.exponential(6, steps) + offsets[repeat % len(offsets)]
        tables.append(
            pl.DataFrame(
                {
                    "repeat": np.full(steps, repeat),
                    "batch": batch.astype(int),
                    "cache_blocks": blocks,
                    TIME: with_outliers(rng, us, outliers),
                }
            )
        )
    return pl.concat(tables)


def slope_of(steps: pl.DataFrame, seed: int = 1) -> Distribution:
    estimate = slope_us_per_1k_blocks(make_cells(steps, (TIME,)), TIME, seed)
    assert estimate is not None
    return estimate


@pytest.mark.parametrize("slope", [0.0, 1.0, 85.6])
def test_a_known_slope_is_recovered_though_the_batch_grows_with_cache(slope: float):
    naive = np.polyfit(*growth(3, (slope,), outliers=0)["cache_blocks", TIME], 1)[0]
    assert naive * 1_000 > slope + 1.5, "the synthetic data no longer tilts"
    assert slope_of(growth(3, (slope,))).value == pytest.approx(slope, abs=0.4)


def test_an_offset_between_repeats_does_not_move_the_slope():
    steps = growth(5, (4.0, 4.0), offsets=(0.0, 300.0), outliers=0)
    # The slower repeat saw only the upper half: together they look steep.
    upper = (pl.col("repeat") == 0) | (pl.col("cache_blocks") > 8_000)
    lower = (pl.col("repeat") == 1) | (pl.col("cache_blocks") < 8_000)
    assert slope_of(steps.filter(upper, lower)).value == pytest.approx(4.0, abs=0.5)


def test_a_fifth_of_the_steps_stolen_at_large_cache_hardly_moves_the_slope():
    clean = growth(7, (2.0,), outliers=0.0)
    rng = np.random.default_rng(8)
    hit = (clean["cache_blocks"] > 10_000).to_numpy() & (rng.random(clean.height) < 0.2)
    stolen = clean.with_columns(
        pl.when(pl.Series(hit)).then(pl.col(TIME) * 20).otherwise(TIME)
    )
    assert slope_of(stolen).value == pytest.approx(2.0, abs=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_interval_covers_the_true_slope_near_its_nominal_95_percent(repeats: int):
    runs = 80
    covered = 0
    for seed in range(runs):
        low, high = slope_of(growth(seed, (5.0,) * repeats), seed).ci95
        covered += low <= 5.0 <= high
    # 95 % of 80 is 76; five fewer is the 1 % quantile of a true 95 %.
    assert covered >= 71


def test_the_interval_spans_repeats_that_disagree():
    low, high = slope_of(growth(11, (1.0, 6.0, 12.0), steps=2_000)).ci95
    assert low < 3.0 and high > 10.0


def test_the_same_seed_gives_the_same_interval():
    steps = growth(13, (1.0, 1.0))
    assert slope_of(steps, 9).ci95 == slope_of(steps, 9).ci95


def test_too_few_steps_or_a_constant_cache_give_no_slope():
    few = growth(1, (1.0,), steps=60)
    still = growth(1, (1.0,)).with_columns(pl.lit(500.0).alias("cache_blocks"))
    for steps in (few, still, few.clear()):
        cells = make_cells(steps, (TIME,))
        assert slope_us_per_1k_blocks(cells, TIME) is None


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


def test_resampling_keeps_the_number_of_blocks_of_equal_repeats():
    repeat_of_block = np.repeat([0, 1, 2], 10)
    counts = resample_blocks(repeat_of_block, 50, np.random.default_rng(0))
    assert (counts.sum(axis=1) == 30).all()
    whole = counts.reshape(50, 3, 10).sum(axis=2)
    assert (whole % 10 == 0).all(), "a repeat is drawn whole, then its blocks"


def test_blocks_are_runs_of_neighbouring_steps_of_one_repeat():
    steps = add_blocks(pl.DataFrame({"repeat": [0] * 400 + [1] * 50}))
    block = steps["block"].to_numpy()
    assert (np.diff(block) >= 0).all() and set(np.diff(block)) <= {0, 1}
    assert set(block[:400]).isdisjoint(block[400:])


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


@pytest.mark.parametrize(
    ("ci95", "at_most", "at_least"),
    [
        ((1.0, 2.9), "met", "missed"),
        ((1.0, 3.0), "met", "undecided"),
        ((2.9, 3.1), "undecided", "undecided"),
        ((3.0, 5.0), "undecided", "met"),
        ((3.1, 5.0), "missed", "met"),
    ],
)
def test_an_aim_is_judged_by_the_whole_interval(ci95, at_most, at_least):
    found = Estimate(3.0, ci95)
    assert judge(found, Aim(what="a step", at_most=3.0)) == at_most
    assert judge(found, Aim(what="a step", at_least=3.0)) == at_least


def test_nothing_is_met_where_the_interval_is_not_known():
    unknown = Estimate(1.0, (float("nan"), float("nan")))
    assert judge(unknown, Aim(what="a step", at_most=3.0)) == "undecided"


@pytest.mark.parametrize("bounds", [{}, {"at_most": 1.0, "at_least": 0.5}])
def test_an_aim_has_exactly_one_bound(bounds):
    with pytest.raises(ValueError, match="either at_most or at_least"):
        Aim(what="a step", **bounds)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"what": "a step"} | bounds, Aim)


def test_an_aim_says_what_it_asks_for_and_who_asks():
    hooks = Aim(what="hooks", at_most=3.0, unit="us")
    assert str(hooks) == "hooks: at most 3 us (ours)"
    throughput = Aim(what="throughput", at_least=0.9, whose="a paper's")
    assert str(throughput) == "throughput: at least 0.9 (a paper's)"
    row = aims_table([(hooks, Estimate(4.0, (3.5, 4.5)))], ".1f").splitlines()[-1]
    assert row == "| hooks | at most 3 us | ours | 4.0 [3.5, 4.5] | missed |"


def test_an_interval_is_the_same_after_it_has_been_in_a_file():
    found = Estimate(1.25, (-1.0, 2.0))
    encoded = msgspec.json.encode(found)
    assert encoded == b'{"value":1.25,"ci95":[-1.0,2.0]}'
    assert msgspec.json.decode(encoded, type=Estimate) == found
    assert f"{found:+.1f}" == "+1.2 [-1.0, +2.0]"


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
