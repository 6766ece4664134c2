# SPDX-License-Identifier: Apache-2.0
"""What levels add up to: a verdict on a metric, and one on the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from kvtax.records.per_config import ConfigEntry, ConfigEvidence, HeldLevels, RareSteps
from kvtax.records.run import RunRecord
from kvtax.stats import Estimate
from kvtax.stats.held import Fit
from kvtax.verdict.analysis import analyse
from kvtax.verdict.metrics import DECISIVE, JUDGED, margin_of
from kvtax.verdict.trials import LoadedTrial, load_trial
from kvtax.verdict.verdict import (
    held_levels,
    judge_all,
    judge_metric,
    judge_rare,
    overall_verdict,
)
from kvtax.verdict.warnings import config_warnings, largest_relative_bound, undecided
from microbench.summary.growth import short_verdict, verdict_words
from tests.microbench.synthetic import LADDER, PROFILE, Truth, layout, write_trial

X = np.array([0.0, 5.0, 10.0, 15.0, 18.0])
# What a level may lie above a lower one and still be flat.
MARGIN_US = 2.0 * 18


def fit_of(level_us, error_us: float = 1.0, drift_us: float = 0.0) -> Fit:
    """Levels of which each is known to `error_us`, as is the drift."""
    levels, known = np.asarray(level_us, float), error_us**2 * np.eye(len(X))
    return Fit(X, levels, known, drift_us, error_us / 3, 1_000, None, 0.0)


LEVEL = [100.0] * 5
# Between two of these, each known to 1 us, 2.33 us are the one-sided 95 %.
BOUND = 2.33


def judged(found: Fit):
    return judge_metric(found, 0.95, 2.0)


@pytest.mark.parametrize(
    ("last_us", "verdict"),
    [
        (0.0, "flat"),
        (MARGIN_US - BOUND - 1, "flat"),
        # It may be more than the margin, and it may be less.
        (MARGIN_US - BOUND + 1, "inconclusive"),
        (MARGIN_US + BOUND, "inconclusive"),
        (MARGIN_US + 3 * BOUND, "grows"),
    ],
)
def test_a_rise_is_flat_or_growth_where_that_is_certain(last_us, verdict):
    assert judged(fit_of([100, 100, 100, 100, 100 + last_us])).verdict == verdict


def test_growth_need_not_be_a_line_and_may_come_and_go():
    assert judged(fit_of([100, 100, 200, 100, 100])).verdict == "grows"
    assert judged(fit_of([100, 100, 100, 100, 200])).shape == "only when full"
    assert judged(fit_of(100 + 10 * X)).shape == "linear"


def test_levels_known_too_badly_are_not_flat():
    assert judged(fit_of(LEVEL, error_us=20)).verdict == "inconclusive"


def test_a_cost_that_falls_with_cache_is_flat_and_is_said_to_fall():
    found = judged(fit_of(500 - 20 * X))
    assert (found.verdict, found.shape) == ("flat", "falls")


@pytest.mark.parametrize(
    ("drift_us", "error_us", "verdict"),
    [
        # The margin is 36 us. The interval reaches 1.962 errors to both sides.
        (37.0, 0.5, "drifts"),
        (36.9, 0.5, "flat"),
        (-500.0, 0.5, "flat"),
        # What may be more than three margins is not flat.
        (0.0, 54.9, "flat"),
        (0.0, 55.2, "inconclusive"),
        (30.0, 39.6, "flat"),
        (30.0, 39.9, "inconclusive"),
    ],
)
def test_what_rises_from_pass_to_pass_and_not_with_the_level_drifts(
    drift_us, error_us, verdict
):
    drifting = replace(fit_of(LEVEL, drift_us=drift_us), drift_error_us=error_us)
    assert judged(drifting).verdict == verdict


@pytest.mark.parametrize(
    ("metric", "margin"),
    [(name, {"prefill": 10.0, "timed_many": 4.0}.get(name, 2.0)) for name in JUDGED],
)
def test_a_metric_may_rise_by_its_own_margin(metric, margin):
    assert margin_of(metric) == margin
    within, beyond = (
        judge_all({metric: fit_of(100 + slope * X)}, 0.95)[metric].verdict
        for slope in (margin - 0.3, margin + 0.3)
    )
    assert (within, beyond) == ("flat", "grows")


@pytest.mark.parametrize(
    ("age_us", "error_us", "verdict"),
    # The margin is 36 us, and the interval reaches 1.962 errors to both sides.
    [(37.0, 0.5, "drifts"), (36.9, 0.5, "flat"), (-90.0, 0.5, "flat")],
)
def test_what_rises_with_the_time_since_a_reset_drifts_by_age(
    age_us, error_us, verdict
):
    aged = replace(fit_of(LEVEL), age_us=age_us, age_error_us=error_us)
    assert judged(aged).verdict == verdict
    assert (judged(aged).shape == "age") == (verdict == "drifts")


def test_what_rises_with_the_level_grows_whatever_drifts_besides():
    assert judged(fit_of(100 + 10 * X, drift_us=500)).verdict == "grows"


def test_what_grows_only_if_age_is_no_matter_is_not_known():
    grown = fit_of(100 + 10 * X)
    assert judged(replace(grown, aged=fit_of(100 + 9 * X))).verdict == "grows"
    assert judged(replace(grown, aged=fit_of(LEVEL))).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("chance", "verdict"), [(0.0009, "grows"), (0.001, "flat"), (1.0, "flat")]
)
def test_long_steps_that_come_more_often_than_by_chance_grow(chance, verdict):
    assert judge_rare(RareSteps(1_000.0, [9], [1], chance))["rare"].verdict == verdict
    assert judge_rare(None) == {}


def test_levels_are_stated_with_what_a_full_cache_adds_and_at_most():
    found = fit_of([100, 100, 100, 100, 110])
    held = held_levels(found, 0.95, judged(found))
    assert held.cache_blocks == [0, 5_000, 10_000, 15_000, 18_000]
    assert held.us == [100.0] * 4 + [110.0]
    assert held.full_adds_us.value == 10.0
    # 1.962 times the error of a pair, 1.414.
    assert held.full_adds_us.ci95 == pytest.approx((7.225, 12.775), abs=2e-3)
    assert held.most_us == pytest.approx(10 + BOUND, abs=0.01)
    assert held.most_us_per_1k_blocks == pytest.approx((10 + BOUND) / 18, abs=1e-3)
    assert held.age_us is None


def test_more_looks_ask_for_more_certainty():
    nearly = fit_of([100, 100, 100, 100, 100 + MARGIN_US - BOUND - 0.2])
    assert judge_metric(nearly, 0.95, 2.0).verdict == "flat"
    assert judge_metric(nearly, 0.99, 2.0).verdict == "inconclusive"


FLAT = dict.fromkeys(DECISIVE, "flat")


@pytest.mark.parametrize("part", DECISIVE)
def test_flat_needs_all_that_was_timed_to_be_flat(part):
    assert overall_verdict(FLAT, DECISIVE) == "flat"
    for verdict in ("grows", "drifts", "inconclusive"):
        assert overall_verdict(FLAT | {part: verdict}, ()) == verdict


@pytest.mark.parametrize("part", DECISIVE)
def test_a_part_that_should_be_there_and_is_not_keeps_from_flat(part):
    others = {name: "flat" for name in DECISIVE if name != part}
    assert overall_verdict(others, DECISIVE) == "inconclusive"
    assert overall_verdict(others, others) == "flat"
    # Growth is growth, whatever else is missing.
    assert overall_verdict(others | {"rare": "grows"}, DECISIVE) == "grows"


@pytest.mark.parametrize("other", ["schedule", "overhead", "step", "processes", "rare"])
def test_anything_that_grows_convicts_and_what_is_noisy_has_a_bound_beside_it(other):
    assert overall_verdict(FLAT | {other: "grows"}, DECISIVE) == "grows"
    for verdict in ("drifts", "inconclusive"):
        assert overall_verdict(FLAT | {other: verdict}, DECISIVE) == "flat"


def test_no_levels_are_no_verdict():
    assert overall_verdict({}, ()) == "inconclusive"
    assert overall_verdict({"schedule": "flat", "rare": "flat"}, ()) == "inconclusive"


def entry_of(most: dict[str, float], **verdicts: str) -> ConfigEntry:
    """A config whose metrics grow by at most `most` us per 1,000 blocks."""
    verdict_of = dict.fromkeys(most, "flat") | verdicts
    return ConfigEntry(
        n_window_steps=1_000,
        slope_us_per_1k_blocks=dict.fromkeys(JUDGED),
        requests=dict.fromkeys(("scheduled", "ok", "failed", "cancelled"), 0),
        lag_ms=None,
        records=dict.fromkeys(
            ("engine_steps", "engine_without_worker", "torn_lines"), 0
        ),
        verdict_of=verdict_of,
        verdict=overall_verdict(verdict_of, ()),
        held={
            name: HeldLevels(
                cache_blocks=[0, 10_000],
                us=[1.0, 1.0],
                full_adds_us=Estimate(1.0, (-9.0, 11.0)),
                most_us=10 * bound,
                most_us_per_1k_blocks=bound,
                drift_us_per_pass=0.0,
                age_us=None,
                shape=None,
            )
            for name, bound in most.items()
        },
    )


MOST = {"timed": 0.5, "timed_many": 0.7, "prefill": 3.0, "threads": 0.1}


def test_the_doubt_is_that_of_the_least_known_part_by_its_own_margin():
    entry = entry_of(MOST | {"timed": 3.0}, timed="inconclusive")
    assert largest_relative_bound(entry) == pytest.approx(1.5)
    prompts = entry_of(
        MOST | {"timed": 3.0, "prefill": 40.0},
        timed="inconclusive",
        prefill="inconclusive",
    )
    assert largest_relative_bound(prompts) == pytest.approx(4.0)
    assert largest_relative_bound(entry_of(MOST)) == 0


def test_an_undecided_config_names_what_is_undecided_and_how_large_it_can_be():
    entry = entry_of(MOST | {"timed": 3.0}, timed="inconclusive")
    (warning,) = undecided(entry)
    assert warning.kind == "undecided"
    words = verdict_words(entry)
    assert words.startswith("undecided in timed; a full cache adds at most 30.0 µs to")
    assert short_verdict(entry) == "not known"
    assert undecided(entry_of(MOST)) == []


def test_a_verdict_is_a_statement_of_what_a_full_cache_adds():
    flat, grown = entry_of(MOST), entry_of(MOST, timed="grows")
    assert short_verdict(flat) == "at most 7.0 µs"
    assert "at most 5.0 µs to what scheduler and connector take" in verdict_words(flat)
    assert short_verdict(grown) == "grows"
    assert "+1.0 [-9.0, +11.0] µs to what scheduler and" in verdict_words(grown)
    missing = entry_of(MOST)
    missing.verdict, missing.not_measured = "inconclusive", ["threads"]
    assert verdict_words(missing).startswith("not measured: threads; ")
    aging = entry_of(MOST, timed="drifts")
    assert short_verdict(aging) == "grows with time"


def test_a_config_with_too_few_holds_says_so_and_nothing_else():
    entry = entry_of({})
    assert entry.verdict == "inconclusive" and largest_relative_bound(entry) == 0
    assert undecided(entry) == []
    assert "too few holds" in verdict_words(entry)
    evidence = ConfigEvidence(facts=entry)
    assert "no_slope" in {found.kind for found in config_warnings(entry, evidence)}


LEVELS, STEPS = len(LADDER.levels), 1_600


def trial_of(folder: Path, truth: Truth, repeat: int, seed: int) -> LoadedTrial:
    """Write a trial of STEPS, and load it."""
    write_trial(folder / str(seed), truth, repeat, seed, STEPS, 16_000)
    return load_trial(folder / str(seed), truth.name, repeat)


def slowed(trial: LoadedTrial, start: float, stop: float, factor: float) -> LoadedTrial:
    """The trial on a machine that is `factor` slower for a part of the time."""
    assert trial.steps is not None
    count = trial.steps.height
    place = pl.int_range(count) / count
    times = ("schedule_us", "overhead_us", "step_us")
    steps = trial.steps.with_columns(
        pl.when(place.is_between(start, stop)).then(pl.col(t) * factor).otherwise(t)
        for t in times
    )
    return replace(trial, steps=steps)


def verdict_of(trials: list[LoadedTrial]) -> str:
    document = analyse(RunRecord(profile=PROFILE), trials, None).document
    return document.configs["plain"].verdict


@pytest.mark.slow
def test_a_flat_cost_is_never_called_growing_on_a_noisy_machine(tmp_path):
    rng = np.random.default_rng(0)
    for seed in range(12):
        plain = Truth("plain")
        trials = [trial_of(tmp_path, plain, r, 100 * seed + r) for r in range(3)]
        # One neighbour, who slows a random part of each lifetime.
        noisy = []
        for trial in trials:
            start = rng.uniform(0, 0.9)
            stop = start + rng.uniform(0.05, 0.5)
            noisy.append(slowed(trial, start, stop, rng.uniform(1.1, 1.8)))
        assert verdict_of(noisy) != "grows", seed


def test_a_neighbour_that_looks_like_growth_in_one_pass_does_not_convince(tmp_path):
    trial = trial_of(tmp_path, Truth("plain"), 0, 0)
    holds = [span for span in layout(STEPS) if span.level is not None]
    # Slow in the highest level of one pass, then gone.
    full = [span for span in holds if span.level == LEVELS - 1][1]
    start, stop = (step / STEPS for step in (full.first, full.first + full.count))
    assert verdict_of([slowed(trial, start, stop, 2.0)]) != "grows"


def test_what_rises_with_the_level_is_growth_whatever_drifts_besides(tmp_path):
    both = Truth("plain", slope=20.0, drift=40.0)
    trials = [trial_of(tmp_path, both, r, r) for r in range(2)]
    assert verdict_of(trials) == "grows"


@pytest.mark.parametrize(("slope", "verdict"), [(4.0, "grows"), (0.0, "flat")])
def test_growth_just_above_the_margin_is_found_on_one_server(tmp_path, slope, verdict):
    trial = trial_of(tmp_path, Truth("plain", slope=slope), 0, 0)
    assert verdict_of([trial]) == verdict
