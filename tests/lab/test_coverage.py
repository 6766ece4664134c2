# SPDX-License-Identifier: Apache-2.0
"""Intervals over 2, 3 and 5 processes hold the truth in 93 % of runs or more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.stats.coverage import (
    AIM,
    BETWEEN,
    LOOKS,
    NOISES,
    REPEATS,
    Cell,
    covered,
    differences_covered,
    looks_covered,
)
from lab.stats.processes import Repeats, between_spread, look_level, over_processes

pytestmark = pytest.mark.slow

CELLS = [
    Cell(repeats, between, noise)
    for noise in NOISES
    for repeats in REPEATS
    for between in BETWEEN
]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("noise", NOISES)
def test_the_noise_between_made_up_processes_is_what_its_name_says(noise, rng):
    values = NOISES[noise](rng, (400_000,))
    assert values.mean() == pytest.approx(0, abs=0.01)
    assert values.std() == pytest.approx(1, abs=0.02)


def under_the_aim(configs: int, odd: float, rng: np.random.Generator) -> list[Cell]:
    cells = [replace(cell, configs=configs, odd=odd) for cell in CELLS]
    return [cell for cell in cells if covered(cell, rng)[0] < AIM]


def test_of_twelve_configs_alike_enough_intervals_hold_the_truth_in_every_cell(rng):
    assert under_the_aim(12, 1.0, rng) == []


def test_one_config_three_times_as_noisy_spoils_no_cell(rng):
    assert under_the_aim(12, 3.0, rng) == []


def test_one_config_alone_is_covered_in_every_cell(rng):
    assert under_the_aim(1, 1.0, rng) == []


@pytest.mark.parametrize(("repeats", "least"), [(2, 0.74), (3, 0.76), (5, 0.82)])
def test_the_one_noisy_config_itself_is_covered_less_and_no_worse_than_we_say(
    repeats: int, least: float, rng
):
    """Two repeats cannot show that their config is noisier than the others."""
    found = [
        covered(replace(cell, odd=3.0), rng)[1]
        for cell in CELLS
        if cell.repeats == repeats
    ]
    assert least < min(found) < AIM


@pytest.mark.parametrize("repeats", REPEATS)
def test_the_difference_of_two_configs_is_covered(repeats: int, rng):
    for between in (0.5, 3.0):
        assert differences_covered(Cell(repeats, between, runs=800), rng) >= AIM


@pytest.mark.parametrize("noise", NOISES)
def test_no_look_is_wrong_in_enough_runs(noise: str, rng):
    for between in BETWEEN:
        assert looks_covered(Cell(LOOKS[-1], between, noise), rng) >= AIM


def test_a_run_that_stops_each_config_when_it_is_decided_holds_the_truth(rng):
    """The configs that go on share a pool with those that stopped."""
    level, runs, bound, held, stopped = look_level(len(LOOKS)), 150, 3.0, 0, []
    for run in range(runs):
        values, variances = Cell(LOOKS[-1], 1.0, runs=1).draw(rng)
        repeats = np.full(12, LOOKS[0])
        open_configs = set(range(12))
        for look in LOOKS:
            repeats[list(open_configs)] = look
            groups = [
                Repeats(values[0, one, :n], variances[0, one, :n], 1.0)
                for one, n in enumerate(repeats)
            ]
            spread = between_spread(groups)
            for one in sorted(open_configs):
                estimate = over_processes(groups[one], spread, 12 * run + one)
                low, high = estimate.interval(level)
                decided = (-bound < low and high < bound) or low > 0 or high < 0
                if decided or look == LOOKS[-1]:
                    open_configs.remove(one)
                    held += low <= 0 <= high
                    stopped.append(look)
    assert {2, 3, 4, 5} <= set(stopped), "the rule no longer stops at different looks"
    assert held / (12 * runs) >= AIM
