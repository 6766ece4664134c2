# SPDX-License-Identifier: Apache-2.0
"""What levels add up to: a verdict on a metric, and one on the config."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtax.records.per_config import ConfigEntry, HeldLevels
from kvtax.stats.held import Fit
from kvtax.verdict.measured import Fits
from kvtax.verdict.metrics import JUDGED, margin_of
from kvtax.verdict.verdict import (
    held_levels,
    judge_all,
    judge_metric,
    overall_verdict,
)
from kvtax.verdict.warnings import config_warnings, largest_relative_bound, undecided
from microbench.summary.growth import verdict_words
from tests.microbench.synthetic import Truth, trial_steps

X = np.array([0.0, 5.0, 10.0, 15.0, 18.0])
# What a level may lie above a lower one and still be flat.
MARGIN_US = 2.0 * 18


def fit_of(level_us, error_us: float = 1.0, drift_us: float = 0.0) -> Fit:
    """Levels of which each is known to `error_us`, as is the drift."""
    levels = np.asarray(level_us, float)
    return Fit(
        X, levels, error_us**2 * np.eye(len(X)), drift_us, error_us / 3, df=1_000
    )


LEVEL = [100.0] * 5
# Between two of these, each known to 1 us, 2.33 us are the one-sided 95 %.
BOUND = 2.33


def judged(usual: Fit, mean: Fit | None = None):
    return judge_metric(Fits(usual, mean), 0.95, 2.0)


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
    [(name, 10.0 if name == "prefill" else 2.0) for name in JUDGED],
)
def test_a_metric_may_rise_by_its_own_margin(metric, margin):
    assert margin_of(metric) == margin
    within, beyond = (
        judge_all({metric: Fits(fit_of(100 + slope * X))}, 0.95)[metric].verdict
        for slope in (margin - 0.3, margin + 0.3)
    )
    assert (within, beyond) == ("flat", "grows")


def test_what_rises_from_pass_to_pass_in_rare_steps_alone_drifts_too():
    found = judged(fit_of(LEVEL), fit_of(LEVEL, drift_us=MARGIN_US + 2))
    assert (found.verdict, found.shape) == ("drifts", "rare")
    unsure = replace(fit_of(LEVEL), drift_error_us=2 * MARGIN_US)
    found = judged(fit_of(LEVEL), unsure)
    assert (found.verdict, found.shape) == ("inconclusive", "rare")


def test_what_rises_with_the_level_grows_whatever_drifts_besides():
    assert judged(fit_of(100 + 10 * X, drift_us=500)).verdict == "grows"


def test_growth_in_rare_steps_alone_is_growth_and_keeps_from_flat():
    usual, mean = fit_of(LEVEL), fit_of(100 + 10 * X)
    assert (judged(usual, mean).verdict, judged(usual, mean).shape) == ("grows", "rare")
    unsure = judged(usual, fit_of(LEVEL, error_us=20))
    assert (unsure.verdict, unsure.shape) == ("inconclusive", "rare")
    assert judged(usual, fit_of(LEVEL)).verdict == "flat"


def test_the_most_that_a_slope_can_be_covers_the_rare_steps_too():
    usual, mean = fit_of(LEVEL), fit_of(LEVEL, error_us=10)
    found = Fits(usual, mean)
    held = held_levels(found, 0.95, judge_metric(found, 0.95))
    assert held.most_us_per_1k_blocks == pytest.approx(10 * BOUND / 18, rel=0.01)
    assert held.cache_blocks == [0, 5_000, 10_000, 15_000, 18_000]
    assert held.us == held.mean_us == LEVEL
    alone = held_levels(Fits(usual), 0.95, judge_metric(Fits(usual), 0.95))
    assert alone.most_us_per_1k_blocks == pytest.approx(BOUND / 18, rel=0.01)
    assert alone.mean_us is None


def test_more_looks_ask_for_more_certainty():
    nearly = fit_of([100, 100, 100, 100, 100 + MARGIN_US - BOUND - 0.2])
    assert judge_metric(Fits(nearly), 0.95, 2.0).verdict == "flat"
    assert judge_metric(Fits(nearly), 0.99, 2.0).verdict == "inconclusive"


FLAT = dict.fromkeys(JUDGED, "flat")


@pytest.mark.parametrize(
    "part", ["scheduler_cpu", "connector", "prefill", "threads", "all_parts"]
)
def test_flat_needs_every_part_and_their_sum_to_be_flat(part):
    assert overall_verdict(FLAT) == "flat"
    for verdict in ("grows", "drifts", "inconclusive"):
        assert overall_verdict(FLAT | {part: verdict}) == verdict


@pytest.mark.parametrize("whole", ["schedule", "overhead"])
def test_a_whole_that_grows_convicts_and_a_noisy_one_does_not_decide(whole):
    assert overall_verdict(FLAT | {whole: "grows"}) == "grows"
    for verdict in ("drifts", "inconclusive"):
        assert overall_verdict(FLAT | {whole: verdict}) == "flat"


@pytest.mark.parametrize("step", ["step", "step_cpu"])
def test_a_step_that_grows_vetoes_flat(step):
    # It holds what nobody has timed, too, and the model.
    assert overall_verdict(FLAT | {step: "grows"}) == "inconclusive"
    assert overall_verdict(FLAT | {step: "drifts"}) == "flat"


def test_no_levels_are_no_verdict():
    assert overall_verdict({}) == "inconclusive"
    assert overall_verdict({"schedule": "flat", "overhead": "flat"}) == "inconclusive"


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
        verdict=overall_verdict(verdict_of),
        held={
            name: HeldLevels([0, 18_000], [1.0, 1.0], None, bound, 0.0, None)
            for name, bound in most.items()
        },
    )


MOST = {"scheduler_cpu": 0.5, "connector": 0.5, "prefill": 3.0, "all_parts": 1.0}


def test_the_doubt_is_that_of_the_least_known_part_by_its_own_margin():
    entry = entry_of(MOST | {"connector": 3.0}, connector="inconclusive")
    assert largest_relative_bound(entry) == pytest.approx(1.5)
    prompts = entry_of(
        MOST | {"connector": 3.0, "prefill": 40.0},
        connector="inconclusive",
        prefill="inconclusive",
    )
    assert largest_relative_bound(prompts) == pytest.approx(4.0)
    # Their sum has the margin that a single part has.
    total = entry_of(MOST | {"all_parts": 5.0}, all_parts="inconclusive")
    assert largest_relative_bound(total) == pytest.approx(2.5)
    assert largest_relative_bound(entry_of(MOST)) == 0


def test_an_undecided_config_names_what_is_undecided_and_how_large_it_can_be():
    entry = entry_of(MOST | {"connector": 3.0}, connector="inconclusive")
    (warning,) = undecided(entry)
    assert warning.kind == "undecided"
    assert "connector (at most 3.0 µs" in verdict_words(entry)
    assert undecided(entry_of(MOST)) == []
    hidden = entry_of(MOST | {"step": 9.0}, step="grows")
    assert "none of its parts" in verdict_words(hidden)


def test_a_config_with_too_few_holds_says_so_and_nothing_else():
    entry = entry_of({})
    assert entry.verdict == "inconclusive" and largest_relative_bound(entry) == 0
    assert undecided(entry) == []
    assert "too few holds" in verdict_words(entry)
    engine, _ = trial_steps(Truth("plain"), 0, 0, 400, 16_000)
    steps = engine.rename({"scheduled": "batch"})
    assert "no_slope" in {found.kind for found in config_warnings(entry, steps)}
