# SPDX-License-Identifier: Apache-2.0
"""Levels of an axis that was held: what grows is seen, named, and as wide as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtax.stats.held import Holds, falls, fit, growth, most_rise_us

SHARES = np.array([0.0, 0.3, 0.6, 0.92, 1.0])
BLOCKS_1K, PASSES, PASS_S = 18.0, 6, 40.0
MARGIN_US = 2 * BLOCKS_1K
RUNS = 400


def made_up(
    rng: np.random.Generator,
    level_us=SHARES * 0,
    sd_us: float = 5.0,
    servers: int = 1,
    passes: int = PASSES,
    drift_us: float = 0.0,
    offsets_us: float = 0.0,
    slower: float = 1.0,
    disturbed: float = 1.0,
) -> Holds:
    """Holds of servers whose levels are `level_us`.

    The time rises by `drift_us` in each pass, servers are `offsets_us` apart, and in
    half of the holds the machine takes `slower` times as long, which is known. In a
    third of them noise is `disturbed` times as large, and the machine known to be slow.
    """
    levels = len(SHARES)
    server = np.repeat(np.arange(servers), passes * levels)
    number = np.tile(np.repeat(np.arange(passes), levels), servers)
    level = np.tile(np.arange(levels), servers * passes)
    at = number + level / levels
    # Levels are those of a machine as slow as on average.
    slowness = slower ** rng.permutation(np.resize([-0.5, 0.5], len(level)))
    values = 200 + np.asarray(level_us)[level]
    # Half of the time is as slow as the machine, the rest is not.
    values = values * (1 + 0.5 * np.log(slowness)) + offsets_us * server
    values = values + drift_us * at
    noise = np.where(rng.permutation(len(level)) % 3 == 0, disturbed, 1.0)
    return Holds(
        server=server,
        level=level,
        x=BLOCKS_1K * SHARES[level],
        time_s=1_000 + PASS_S * at,
        slowness=slowness[:, None],
        disturbance=np.sqrt(noise),
        values=values + rng.normal(0, sd_us * noise),
    )


MACHINES = {
    "steady": {},
    "slower from pass to pass": {"drift_us": 60.0},
    "of two speeds": {"slower": 1.8},
    "disturbed in some holds": {"disturbed": 8.0},
    "three servers": {"servers": 3, "passes": 2, "offsets_us": 300.0},
    "all at once": {"servers": 2, "drift_us": -30.0, "slower": 1.5, "offsets_us": 90.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("slope", [0.0, 3.0])
def test_the_slope_is_unbiased_and_its_interval_holds_it_as_often_as_it_says(
    machine: str, slope: float
):
    rng, held, slopes, errors = np.random.default_rng(1), 0, [], []
    for _ in range(RUNS):
        level_us = slope * BLOCKS_1K * SHARES
        found = fit(made_up(rng, level_us, **MACHINES[machine]))
        value, error = found.slope()
        held += abs(value - slope) <= found.reach(error)
        slopes.append(value)
        errors.append(error)
    assert np.mean(slopes) == pytest.approx(slope, abs=4 * np.std(slopes) / RUNS**0.5)
    assert np.std(slopes) == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.1)
    assert 0.92 <= held / RUNS <= 0.98


def test_a_drift_is_stated_per_pass_and_not_taken_for_growth():
    rng = np.random.default_rng(2)
    found = fit(made_up(rng, drift_us=60.0, servers=2, offsets_us=500.0))
    assert found.drift_us == pytest.approx(60, abs=4 * found.drift_error_us)
    assert found.drift_error_us < 3
    assert growth(found, MARGIN_US, 0.95) is None
    assert most_rise_us(found, 0.95) < MARGIN_US


def test_two_speeds_that_are_known_do_not_widen_the_interval():
    error_us = [
        fit(made_up(np.random.default_rng(3), **machine)).slope()[1]
        for machine in ({}, {"slower": 2.0})
    ]
    assert error_us[1] < 1.3 * error_us[0]
    unknown = made_up(np.random.default_rng(3), slower=2.0)
    unknown = replace(unknown, slowness=np.ones((len(unknown.values), 1)))
    assert fit(unknown).slope()[1] > 4 * error_us[0]


def test_holds_that_are_known_to_be_disturbed_hardly_widen_the_interval():
    rng = np.random.default_rng(14)
    quiet, disturbed = (
        np.mean([fit(made_up(rng, disturbed=n)).slope()[1] for _ in range(40)])
        for n in (1.0, 8.0)
    )
    assert disturbed < 1.4 * quiet
    unknown = made_up(rng, disturbed=8.0)
    unknown = replace(unknown, disturbance=np.ones(len(unknown.values)))
    assert fit(unknown).slope()[1] > 2.5 * quiet


def test_levels_are_means_over_the_servers_whatever_these_differ_by():
    rng = np.random.default_rng(4)
    level_us = 20 * BLOCKS_1K * SHARES
    found = fit(made_up(rng, level_us, servers=3, offsets_us=200.0))
    assert found.level_us == pytest.approx(400 + level_us, abs=8)
    # A server that lost its lowest levels does not tilt the others.
    holds = made_up(rng, level_us, servers=3, offsets_us=1_000.0)
    kept = (holds.server < 2) | (holds.level > 2)
    part = Holds(**{name: of[kept] for name, of in vars(holds).items()})
    assert fit(part).slope()[0] == pytest.approx(20, abs=0.5)


SHAPES = {
    "linear": 300 * SHARES,
    "step": np.array([0, 0, 300, 300, 300]),
    "only when full": np.array([0, 0, 0, 0, 300]),
    "saturating": np.array([0, 300, 300, 300, 300]),
    "curved": 600 * SHARES**3,
    "not monotone": np.array([0, 150, 300, 60, 0]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_growth_of_every_shape_is_seen_and_named(shape: str):
    rng, named = np.random.default_rng(5), []
    for _ in range(60):
        named.append(growth(fit(made_up(rng, SHAPES[shape])), MARGIN_US, 0.95))
    assert named.count(shape) >= 57, named


def test_what_falls_does_not_grow_and_is_called_falling():
    found = fit(made_up(np.random.default_rng(7), -300 * SHARES))
    assert growth(found, MARGIN_US, 0.95) is None
    assert falls(found, MARGIN_US, 0.95)
    assert not falls(fit(made_up(np.random.default_rng(7))), MARGIN_US, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sd_us", [5.0, 40.0])
def test_no_pair_of_levels_that_rises_by_two_margins_is_ever_called_flat(
    shape: str, sd_us: float
):
    rng, flat = np.random.default_rng(8), 0
    level_us = SHAPES[shape] * (2 * MARGIN_US / SHAPES[shape].max())
    for _ in range(RUNS // 4):
        flat += most_rise_us(fit(made_up(rng, level_us, sd_us)), 0.95) < MARGIN_US
    assert flat == 0


@pytest.mark.slow
def test_a_rise_of_the_margin_is_called_flat_in_at_most_a_twentieth_of_runs():
    rng, flat = np.random.default_rng(9), 0
    # The worst case: one pair alone.
    level_us = np.array([0, 0, 0, 0, MARGIN_US])
    for _ in range(RUNS):
        flat += most_rise_us(fit(made_up(rng, level_us)), 0.95) < MARGIN_US
    assert flat / RUNS < 0.07


@pytest.mark.slow
def test_nothing_is_said_to_grow_by_chance_though_every_pair_is_tested():
    rng = np.random.default_rng(10)
    machines = list(MACHINES.values())
    grown = [
        growth(fit(made_up(rng, sd_us=40.0, **machines[n % len(machines)])), 0.0, 0.95)
        for n in range(RUNS)
    ]
    assert sum(found is not None for found in grown) / RUNS < 0.07


@pytest.mark.parametrize("servers", [1, 3])
def test_a_single_pass_cannot_tell_a_level_from_the_time(servers: int):
    rng = np.random.default_rng(11)
    assert fit(made_up(rng, servers=servers, passes=1)) is None
    assert fit(made_up(rng, servers=servers, passes=2)) is not None


def test_one_level_or_levels_that_do_not_rise_are_nothing_to_fit():
    holds = made_up(np.random.default_rng(12))
    lowest = Holds(**{name: of[holds.level == 0] for name, of in vars(holds).items()})
    assert fit(lowest) is None
    assert fit(replace(holds, x=np.full(len(holds.x), 9.0))) is None


def test_holds_that_are_alike_to_the_last_bit_still_have_an_interval():
    found = fit(made_up(np.random.default_rng(13), sd_us=0.0))
    assert most_rise_us(found, 0.95) == pytest.approx(0, abs=0.01)
    assert growth(found, MARGIN_US, 0.95) is None
    assert not found.is_bent()
