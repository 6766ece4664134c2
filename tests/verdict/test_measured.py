# SPDX-License-Identifier: Apache-2.0
"""Estimates of a config: slopes, levels and how often a run may look at them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from kvtax.records.per_config import ConfigEntry
from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.records.run import Role, RunRecord
from kvtax.stats import Estimate
from kvtax.verdict.analysis import analyse, stated_cache_blocks
from kvtax.verdict.entry import (
    compare_with_baseline,
    compare_with_floor,
    noise_floor,
    set_parts,
)
from kvtax.verdict.holds import hold_table
from kvtax.verdict.measured import (
    Comparison,
    ConfigEstimates,
    ConfigSteps,
    Level,
    estimate_all,
    promised_metrics,
    steps_of_all,
)
from kvtax.verdict.roles import Roles
from kvtax.verdict.trials import LoadedTrial
from tests.harness.made_up import profile
from tests.verdict.conftest import cpu, hold

SHARES = (0.0, 0.5, 0.9, 1.0)
LADDER = Ladder(list(SHARES), 4, 8, 200, 8, 12.0)
BLOCKS = 10_000
PASSES = 4


@pytest.mark.parametrize(
    ("repeats", "most_repeats", "looks"), [(2, 2, 1), (2, 3, 2), (2, 6, 5), (4, 2, 1)]
)
def test_a_run_looks_once_and_again_after_each_further_repeat(
    repeats, most_repeats, looks
):
    settings = {"repeats": repeats, "most_repeats": most_repeats}
    assert profile(LADDER, **settings).looks == looks


def trial(repeat: int = 0, noise_us: float = 1.0, **changes: float) -> LoadedTrial:
    """Passes in which schedule() takes 100 us and 3 per 1,000 blocks.

    One pass in two is `noise_us` slower at every other level.
    """
    holds = []
    for number in range(PASSES):
        for level, share in enumerate(SHARES):
            us = 100 + 3 * share * BLOCKS / 1_000 + noise_us * (number * level % 2)
            blocks = round(share * BLOCKS)
            times = {"schedule_us": us} | changes
            place = number * len(SHARES) + level
            holds.append(hold(repeat, place, level, cache_blocks=blocks, **times))
    filling = hold(repeat, steps=200, cache_blocks=range(0, 8_000, 40))
    growth = filling.with_columns(
        phase=pl.lit(int(Phase.GROWTH), pl.Int64),
        schedule_us=pl.col("cache_blocks") / 1_000 * 7,
    )
    table = pl.concat([growth, *holds], how="diagonal")
    return LoadedTrial("plain", repeat, None, None, steps=table)


def steps_of(*trials: LoadedTrial) -> ConfigSteps:
    return steps_of_all({"plain": trials or (trial(),)}, LADDER)["plain"]


def measured(*trials: LoadedTrial, looks: int = 1) -> ConfigEstimates:
    steps = steps_of(*trials)
    return estimate_all({"plain": hold_table(steps.held, steps.cpu)}, looks)["plain"]


def test_slopes_are_per_1000_blocks_and_levels_those_of_the_holds():
    found = measured()
    slope = found.slopes["schedule"]
    assert slope.value == pytest.approx(3.0, abs=0.2)
    assert slope.ci95[0] < 3.0 < slope.ci95[1]
    # The stated level is the third: 127 us at 9,000 blocks.
    steps = steps_of()
    assert np.exp(steps.log_p50()["schedule"]) == pytest.approx([127], abs=1)
    assert steps.level.cache_blocks == 9_000
    assert steps.growth_slopes()["schedule"].value == pytest.approx(7.0)
    assert steps.growth_slopes()["overhead"].value == pytest.approx(0.0, abs=1e-9)
    assert found.slopes["overhead"].value == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("looks", "z"),
    # Pocock's constants for 1, 2 and 5 looks.
    [(1, 1.960), (2, 2.178), (5, 2.413)],
)
def test_intervals_of_slopes_are_as_wide_as_the_looks_ask_for(looks, z):
    """Student's t of 11 degrees of freedom, at the level that z has in the normal."""
    t = {1.960: 2.201, 2.178: 2.502, 2.413: 2.849}[z]
    once = measured().slopes["schedule"].ci95
    found = measured(looks=looks).slopes["schedule"].ci95
    assert np.diff(found)[0] / np.diff(once)[0] == pytest.approx(t / 2.201, rel=0.002)


def test_what_a_run_should_have_measured_is_promised():
    assert promised_metrics(True, LADDER, False) == {"timed", "prefill"}
    assert promised_metrics(True, LADDER, True) == {"timed", "prefill", "threads"}
    many = replace_ladder(many_decoders=32)
    assert promised_metrics(True, many, False) == {"timed", "prefill", "timed_many"}
    # Without a connector there are no calls.
    assert promised_metrics(False, LADDER, False) == {"timed"}


def replace_ladder(**changes) -> Ladder:
    return Ladder(list(SHARES), 4, 8, 200, 8, 12.0, **changes)


def test_servers_are_measured_together_and_a_failed_one_is_left_out():
    failed = LoadedTrial("plain", 2, "it died", None)
    both = (trial(0), trial(1), failed)
    assert steps_of(*both).every["repeat"].unique().to_list() == [0, 1]
    assert measured(*both).fits["schedule"].df > measured().fits["schedule"].df
    assert steps_of_all({"plain": [failed]}, LADDER) == {}


def medians(**p50: tuple[float, ...]) -> Comparison:
    """Compare configs whose servers have these medians of schedule()."""
    return Comparison(
        {name: {"schedule": np.log(us).tolist()} for name, us in p50.items()}
    )


P50 = {"plain": 100.0, "twin": 103.0, "near": 101.0, "far": 150.0, "also": 80.0}


def with_twin() -> Comparison:
    """A baseline at 100 us, a twin at 103, and configs beside them.

    The two servers of a config are 1 % apart: 0.00707 is the standard deviation, so
    with 5 degrees of freedom two configs differ by up to 1.8 % by chance.
    """
    apart = np.exp([0.005, -0.005])
    return medians(**{name: tuple(us * apart) for name, us in P50.items()})


ROLES = Roles({"plain": Role(role="baseline"), "twin": Role(role="twin")})
# Student's t of 5 degrees of freedom.
REACH = 2.5706 * 0.0070711


def test_noise_is_what_the_twin_differs_by():
    noise = noise_floor(dict.fromkeys(P50, measured()), with_twin(), ROLES)
    assert noise.pair == ("plain", "twin")
    low, high = noise.p50_us["schedule"].ci95
    assert noise.p50_us["schedule"].value == 3.0
    assert low == pytest.approx(103 * np.exp(-REACH) - 100, abs=0.1)
    assert high == pytest.approx(103 * np.exp(REACH) - 100, abs=0.1)
    assert noise.slope_us_per_1k_blocks["schedule"].value == 0.0
    assert noise.p50("schedule") == 3.0
    assert noise.p50("step") == 0.0
    assert noise_floor({"plain": measured()}, with_twin(), ROLES).pair is None


def entries(configs: Iterable[str]) -> dict[str, ConfigEntry]:
    return {
        name: ConfigEntry(
            slope_us_per_1k_blocks={},
            verdict_of={},
            requests={},
            records={},
            lag_ms=None,
        )
        for name in configs
    }


def test_a_difference_is_noise_within_its_interval_or_within_the_twins():
    comparison, found = with_twin(), entries(P50)
    noise = noise_floor(dict.fromkeys(P50, measured()), comparison, ROLES)
    compare_with_baseline(found, comparison, "plain", noise, 0.0)
    assert found["plain"].vs_plain is None
    within = {
        name: entry.vs_plain["schedule"].within_noise
        for name, entry in found.items()
        if entry.vs_plain
    }
    assert within == {"twin": True, "near": True, "far": False, "also": False}
    assert found["far"].vs_plain["schedule"].value == 50.0


def test_a_ratio_is_to_the_floor_and_as_sure_as_servers_of_one_config_are_alike():
    comparison, found = with_twin(), entries(P50)
    compare_with_floor(found, comparison, "plain")
    assert found["plain"].vs_noop is None
    ratio = found["far"].vs_noop["schedule"]
    assert ratio.value == 1.5
    interval = 1.5 * np.exp([-REACH, REACH])
    assert ratio.ci95 == pytest.approx(tuple(interval), abs=2e-3)
    # One server of each tells nothing of how servers differ.
    alone = medians(a=(2.0,), b=(3.0,))
    assert alone.ratio("b", "a", "schedule") == Estimate(1.5, None)
    assert alone.ratio("b", "a", "step") is None


def test_parts_cost_a_mean_per_step_of_the_holds_and_their_slope():
    calls = {"scheduler.a_us": 6.0, "scheduler.a_calls": 3.0, "worker.b_us": None}
    one = steps_of(trial(connector_us=[6.0] * 20 + [8.0] * 20, **calls))
    threads = pl.concat(
        [cpu(us=2.5, of="io"), cpu(us=1.0, steps=20, of="io", number=1, level=1)]
    )
    (entry,) = entries(["one"]).values()
    set_parts(entry, replace(one, cpu=threads))
    assert entry.connector.us_per_step == 7.0
    assert entry.connector.slope_per_1k_blocks.value == 0.0
    assert (entry.methods["scheduler.a"].us_per_step) == 6.0
    assert entry.methods["scheduler.a"].calls_per_step == 3.0
    assert entry.methods["worker.b"].slope_per_1k_blocks is None
    assert entry.threads["io"].us_per_step == 2.0


def test_verdicts_hold_in_95_percent_of_runs_however_often_they_look():
    """The most that a slope can be: its part by chance is one-sided Student's t.

    Of 11 degrees of freedom at the level of 1, 2 and 5 looks: 1.796, 2.108 and 2.461.
    """
    bounds = []
    for most_repeats in (1, 2, 5):
        run = RunRecord(profile=profile(LADDER, most_repeats=most_repeats))
        entry = analyse(run, [trial(noise_us=50.0)], None).document.configs["plain"]
        bounds.append(entry.held["schedule"].most_us_per_1k_blocks)
    once, twice, often = bounds
    assert (often - once) / (twice - once) == pytest.approx(0.665 / 0.312, rel=0.02)


def test_levels_are_stated_at_the_median_of_the_configs_caches():
    one = steps_of()
    configs = {
        str(blocks): replace(one, level=Level(hold(cache_blocks=blocks)))
        for blocks in (8_000, 9_000, 16_000)
    }
    configs["failed"] = replace(one, level=None)
    assert stated_cache_blocks(configs) == 9_000
    assert stated_cache_blocks({}) is None
