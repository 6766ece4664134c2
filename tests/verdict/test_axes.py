# SPDX-License-Identifier: Apache-2.0
"""A cell shows whether a cost grows along an axis, and in which shape."""

from __future__ import annotations

import numpy as np
import pytest

from kvtax.records.observatory_cell import CellRecord
from kvtax.stats.distribution import _upper_tail, rises
from kvtax.verdict.axes import AXES, growth, steepest
from tests.harness.made_up import META, made

EACH_AXIS = pytest.mark.parametrize("axis", AXES)


def curve(axis: str, power: float, rise_us: float):
    """10 us, and `rise_us` more at the last level."""
    last = AXES[axis].levels[-1]
    return lambda level: 10.0 + rise_us * (level / last) ** power


@EACH_AXIS
@pytest.mark.parametrize(
    ("power", "rise_us", "words"),
    [
        (0, 0.0, "flat"),
        (1, 20.0, "flat"),
        (1, 1_000.0, "grows, linear"),
        (2, 1_000.0, "grows, curved"),
    ],
)
def test_a_cell_says_whether_a_cost_grows_and_in_which_shape(
    axis, power, rise_us, words
):
    cell = made(**{axis: curve(axis, power, rise_us)})
    assert growth(cell, axis, META).words == words
    others = [other for other in AXES if other != axis]
    assert all(growth(cell, other, META).verdict == "flat" for other in others)


@EACH_AXIS
def test_growth_in_noise_as_large_as_it_has_no_shape(axis):
    cell = made(noise=0.8, **{axis: curve(axis, 1, 100.0)})
    found = growth(cell, axis, META)
    assert found.verdict != "flat" and found.shape is None


@EACH_AXIS
def test_growth_between_linear_and_quadratic_is_neither(axis):
    cell = made(noise=0.001, **{axis: curve(axis, 1.5, 1_000.0)})
    found = growth(cell, axis, META)
    assert found.words == "grows, shape not known"
    assert found.exponent.value == pytest.approx(1.5, abs=0.05)


@EACH_AXIS
def test_a_cost_that_rises_and_falls_again_grows(axis):
    middle = AXES[axis].levels[1]
    cell = made(**{axis: lambda level: 1_010.0 if level == middle else 10.0})
    found = growth(cell, axis, META)
    assert found.words == "grows, not in a line"
    assert found.exponent is None
    assert steepest(cell, axis) == META


def along_running(*passes: list[float]) -> CellRecord:
    """A cell with these passes over 1, 64, 128, 192 and 256 running requests."""
    cell = made()
    cell.means_us["running"][META] = [list(map(float, one)) for one in passes]
    return cell


@pytest.mark.parametrize(
    ("rise_us", "verdict"),
    [
        # 0.2 us per request are 51 us over the axis. Nine passes 1 us apart have a mean
        # known to 0.913 us. 10 pairs: t of 8 degrees at 1 - 0.05 / 10 is 3.355.
        (51 + 0.9129 * 3.355 - 0.05, "flat"),
        (51 + 0.9129 * 3.355 + 0.05, "grows"),
    ],
)
def test_a_pair_of_levels_is_tested_among_all_of_them(rise_us, verdict):
    spread = [-4, -3, -2, -1, 0, 1, 2, 3, 4]
    passes = [[0, 0, rise_us + noise, 0, 0] for noise in spread]
    assert growth(along_running(*passes), "running", META).verdict == verdict


@pytest.mark.parametrize(
    ("slopes", "verdict", "interval"),
    [
        # Of nine passes, the second and the eighth: 0.2 us is the margin.
        ([0.1, 0.21, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4, 9.0], "grows", (0.21, 0.4)),
        ([0.1, 0.19, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4, 9.0], "inconclusive", (0.19, 0.4)),
        ([0.0] * 7 + [0.19, 9.0], "flat", (0.0, 0.19)),
        ([0.0] * 7 + [0.21, 9.0], "inconclusive", (0.0, 0.21)),
        # Of five, the least and the most.
        ([0.21, 0.3, 0.3, 0.3, 0.5], "grows", (0.21, 0.5)),
    ],
)
def test_a_slope_grows_where_its_whole_interval_is_above_the_margin(
    slopes, verdict, interval
):
    levels = np.array([1, 64, 128, 192, 256])
    found = growth(
        along_running(*(list(10 + us * levels) for us in slopes)), "running", META
    )
    assert found.slope.ci95 == pytest.approx(interval)
    assert found.slope.value == pytest.approx(sorted(slopes)[len(slopes) // 2])
    assert found.verdict == verdict
    assert found.last.ci95 == pytest.approx(tuple(10 + 256 * us for us in interval))


@pytest.mark.parametrize(
    ("powers", "shape"),
    [
        ([1.0] * 9, "linear"),
        ([0.62] * 9, "linear"),
        ([0.5] * 9, None),
        ([1.38] * 9, "linear"),
        ([1.5] * 9, None),
        ([1.62] * 9, "curved"),
        ([2.38] * 9, "curved"),
        ([2.5] * 9, None),
        ([1.0] * 7 + [2.0] * 2, None),
    ],
)
def test_a_shape_is_named_where_the_whole_interval_of_the_exponent_lies(powers, shape):
    share = np.array([1, 64, 128, 192, 256]) / 256
    cell = along_running(*(list(10 + 1_000 * share**power) for power in powers))
    assert growth(cell, "running", META).shape == shape


@pytest.mark.slow
def test_noise_is_rarely_called_growth_however_large_and_however_few_the_passes():
    rng, grown = np.random.default_rng(3), 0
    levels = len(AXES["running"].levels)
    for number in range(400):
        cell = made()
        us = 500 + rng.normal(0, (5, 50, 500)[number % 3], (6 + number % 4, levels))
        cell.means_us["running"][META] = us.tolist()
        grown += growth(cell, "running", META).verdict == "grows"
    assert grown / 400 <= 0.05


@EACH_AXIS
def test_the_slope_is_per_unit_of_the_axis(axis):
    told = AXES[axis]
    cell = made(noise=0, **{axis: lambda level: 10.0 + 7.0 * level / told.per})
    found = growth(cell, axis, META)
    assert found.slope.value == pytest.approx(7.0)
    assert found.level_us[-1] == pytest.approx(10 + 7 * told.levels[-1] / told.per)
    assert found.passes == 9


@pytest.mark.slow
def test_the_interval_of_a_slope_holds_the_truth_in_95_of_100_cells():
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        cell = made()
        levels = np.array(AXES["running"].levels)
        us = 10 + 0.5 * levels + rng.standard_normal((9, len(levels)))
        cell.means_us["running"][META] = us.tolist()
        low, high = growth(cell, "running", META).slope.ci95
        held += low <= 0.5 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_a_pass_that_the_machine_spoilt_changes_nothing():
    cell = made(running=curve("running", 1, 1_000.0))
    passes = cell.means_us["running"][META]
    passes[7] = [us * (3 if level % 2 else 1) for level, us in enumerate(passes[0])]
    assert growth(cell, "running", META).shape == "linear"


def test_the_method_that_grows_most_is_named():
    cell = made(running=curve("running", 1, 500.0))
    assert steepest(cell, "running") == META
    assert steepest(cell, "context") is None


def test_a_time_that_was_not_taken_has_no_growth():
    assert growth(made(), "running", "worker.get_finished_us") is None


HELD_PASSES = 9


def events(*by_level: int) -> np.ndarray:
    """One event in each of the first so many passes, by level."""
    return np.array(
        [[number < n for n in by_level] for number in range(HELD_PASSES)], int
    )


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
    assert rises(events(*by_level), 0.001) == grows


def test_a_burst_within_one_hold_is_one_event():
    burst = events(0, 0, 0, 0, 1) * 50
    assert not rises(burst, 0.001)


def test_the_chance_is_that_of_fishers_exact_test():
    from scipy.stats import fisher_exact

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
    assert (
        sum(rises(rng.poisson(0.5, (HELD_PASSES, 5)), 0.001) for _ in range(2_000)) <= 8
    )
