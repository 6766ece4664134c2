# SPDX-License-Identifier: Apache-2.0
"""A cell shows whether a cost grows along an axis, and in which shape."""

from __future__ import annotations

import numpy as np
import pytest

from kvtax.records.observatory_cell import CellRecord
from kvtax.verdict.axes import AXES, growth
from tests.harness.made_up import META, made, slow_at

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
    along = growth(cell, axis, META)
    assert along.verdict != "flat" and along.shape is None


@EACH_AXIS
def test_growth_between_linear_and_quadratic_is_neither(axis):
    cell = made(noise=0.001, **{axis: curve(axis, 1.5, 1_000.0)})
    along = growth(cell, axis, META)
    assert along.words == "grows, shape not known"
    assert along.exponent.value == pytest.approx(1.5, abs=0.05)


@EACH_AXIS
def test_a_cost_that_rises_and_falls_again_grows(axis):
    middle = AXES[axis].levels[1]
    cell = made(**{axis: lambda level: 1_010.0 if level == middle else 10.0})
    along = growth(cell, axis, META)
    assert along.words == "grows, not in a line"
    assert along.exponent is None


def along_running(*passes: list[float]) -> CellRecord:
    """A cell with these passes over 1, 64, 128, 192 and 256 running requests."""
    cell = made()
    cell.means_us["running"][META] = [list(map(float, of_pass)) for of_pass in passes]
    return cell


@EACH_AXIS
@pytest.mark.parametrize(
    ("margins", "verdicts"),
    [(0.9, {"flat"}), (1.0, {"flat", "inconclusive"}), (1.1, {"grows"})],
)
def test_a_slope_grows_where_its_whole_interval_is_above_the_margin(
    axis, margins, verdicts
):
    about = AXES[axis]
    us = margins * about.margin_us / about.per
    cell = made(noise=0.001, **{axis: lambda level: 10.0 + us * level})
    along = growth(cell, axis, META)
    assert along.verdict in verdicts
    low, high = along.slope.ci95
    assert (low > about.margin_us, high < about.margin_us) == (margins > 1, margins < 1)
    assert along.last.ci95[0] <= 10 + us * about.levels[-1] <= along.last.ci95[1]


def aging(
    us_per_s: float, us_per_level: float = 0.0, axis: str = "cache"
) -> CellRecord:
    """A cell whose cost rises with the time since the reset, and along the axis."""
    cell = made()
    cell.holds[axis] = slow_at(axis=axis)
    us = 10 + us_per_level * np.array(AXES[axis].levels)
    us = us + us_per_s * np.array(cell.holds[axis].age_s)
    us = us * (1 + 0.02 * np.random.default_rng(3).standard_normal(us.shape))
    cell.means_us[axis][META] = us.tolist()
    return cell


@pytest.mark.parametrize("axis", ["cache", "cache_at_32"])
def test_what_rises_with_the_time_since_the_reset_is_not_growth_along_the_axis(axis):
    along = growth(aging(us_per_s=60.0, axis=axis), axis, META)
    assert along.words == "grows with time" and along.rises
    low, high = along.slope.ci95
    assert low < 0 < high < AXES[axis].margin_us


def test_growth_is_seen_beside_what_rises_with_the_time_since_the_reset():
    along = growth(aging(us_per_s=60.0, us_per_level=0.02), "cache", META)
    assert along.verdict == "grows"
    low, high = along.slope.ci95
    assert low < 20 < high


@pytest.mark.parametrize("axis", ["running", "context", "arrivals", "fragments"])
def test_where_every_level_follows_a_reset_a_slow_hold_is_not_an_old_cache(axis):
    # A hold is as old as it took, and took longer where the machine was slow.
    assert growth(aging(us_per_s=60.0, axis=axis), axis, META).verdict != "drifts"


def test_a_machine_of_two_speeds_is_told_from_growth_by_the_rest_of_the_step():
    cell, rng = made(), np.random.default_rng(4)
    slow = np.where(rng.random((9, 5)) < 0.3, 3.0, 1.0)
    of_axis = cell.means_us["cache"]
    of_axis[META] = of_axis["worker.get_finished_us"] = (100 * slow).tolist()
    without = growth(cell, "cache", META)
    of_axis["scheduler_us"], of_axis["step_us"] = (
        (us * slow).tolist() for us in (300, 900)
    )
    along = growth(cell, "cache", META)
    assert (without.verdict, along.verdict) == ("inconclusive", "flat")
    assert along.slope.high < without.slope.high / 3
    # Of a step, the rest is a part.
    assert growth(cell, "cache", "step_us").slope.high > 10


def test_holds_in_which_the_rest_of_the_step_was_slow_tilt_no_slope():
    cell, rng = (
        made(noise=0.01, running=curve("running", 1, 1_280.0)),
        np.random.default_rng(5),
    )
    of_axis = cell.means_us["running"]
    slow = np.where(rng.random((9, 5)) < 0.3, rng.uniform(1.5, 5.0, (9, 5)), 1.0)
    of_axis[META] = (slow * np.array(of_axis[META])).tolist()
    wide = growth(cell, "running", META).slope
    rest = slow * np.linspace(300, 900, 5)
    of_axis["scheduler_us"], of_axis["step_us"] = rest.tolist(), (2 * rest).tolist()
    low, high = growth(cell, "running", META).slope.ci95
    assert low < 5 < high
    assert high - low < (wide.high - wide.low) / 5


def test_the_rest_of_the_step_is_no_control_where_it_grows_by_itself():
    cell = made(running=curve("running", 1, 300.0))
    without = growth(cell, "running", META)
    of_axis = cell.means_us["running"]
    of_axis["scheduler_us"], of_axis["step_us"] = (
        [[us * n for n in range(1, 6)]] * 9 for us in (300, 900)
    )
    assert growth(cell, "running", META) == without


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
    about = AXES[axis]
    cell = made(noise=0, **{axis: lambda level: 10.0 + 7.0 * level / about.per})
    along = growth(cell, axis, META)
    assert along.slope.value == pytest.approx(7.0)
    assert along.level_us[-1] == pytest.approx(10 + 7 * about.levels[-1] / about.per)
    assert along.passes == 9


@pytest.mark.slow
def test_the_interval_of_a_slope_holds_the_truth_in_95_of_100_cells():
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        cell = made()
        levels = np.array(AXES["running"].levels)
        us = 10 + 0.5 * levels
        us = us * (1 + 0.02 * rng.standard_normal((9, len(levels))))
        cell.means_us["running"][META] = us.tolist()
        low, high = growth(cell, "running", META).slope.ci95
        held += low <= 0.5 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_a_pass_that_the_machine_spoilt_changes_nothing():
    cell = made(running=curve("running", 1, 1_000.0))
    passes = cell.means_us["running"][META]
    passes[7] = [us * (3 if level % 2 else 1) for level, us in enumerate(passes[0])]
    assert growth(cell, "running", META).shape == "linear"


def test_a_time_that_was_not_taken_has_no_growth():
    assert growth(made(), "running", "worker.get_finished_us") is None
