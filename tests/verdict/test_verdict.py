# SPDX-License-Identifier: Apache-2.0
"""What levels add up to: a verdict on a metric, and one on the config."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtax.records.per_config import LongCalls, RareSteps
from kvtax.stats.held import Fit
from kvtax.verdict.metrics import METRICS
from kvtax.verdict.verdict import (
    TO_CONFIRM,
    Judgement,
    confirmed,
    judge_events,
    judge_long_calls,
    judge_metric,
    judge_rare,
    overall_verdict,
)

X = np.array([0.0, 5.0, 10.0, 15.0, 18.0])
MARGIN = 36.0


def fit_of(levels, error: float = 1.0, drift: float = 0.0) -> Fit:
    """Levels of which each is known to `error`, as is the drift."""
    known = error**2 * np.eye(len(X))
    return Fit(X, np.asarray(levels, float), known, drift, error / 3, 1_000, None, 0.0)


LEVEL = [100.0] * 5
# Between two of these, each known to 1, 2.33 are the one-sided 95 %.
BOUND = 2.33


def judged(fit: Fit, level: float = 0.95) -> Judgement:
    return judge_metric(fit, level, MARGIN)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        (0.0, "flat"),
        (MARGIN - BOUND - 1, "flat"),
        # It may be more than the margin, and it may be less.
        (MARGIN - BOUND + 1, "inconclusive"),
        (MARGIN + BOUND, "inconclusive"),
        (MARGIN + 3 * BOUND, "grows"),
    ],
)
def test_a_rise_is_flat_or_growth_where_that_is_certain(last, verdict):
    assert judged(fit_of([100, 100, 100, 100, 100 + last])).verdict == verdict


def test_growth_need_not_be_a_line_and_may_come_and_go():
    assert judged(fit_of([100, 100, 200, 100, 100])).verdict == "grows"
    assert judged(fit_of([100, 100, 100, 100, 200])).shape == "only when full"
    assert judged(fit_of(100 + 10 * X)).shape == "linear"


def test_levels_known_too_badly_are_not_flat():
    assert judged(fit_of(LEVEL, error=20)).verdict == "inconclusive"


def test_a_cost_that_falls_with_cache_is_flat_and_is_said_to_fall():
    assert judged(fit_of(500 - 20 * X)) == Judgement("flat", "falls")


@pytest.mark.parametrize(
    ("drift", "error", "verdict"),
    [
        # The interval reaches 1.962 errors to both sides.
        (37.0, 0.5, "drifts"),
        (36.9, 0.5, "flat"),
        (-500.0, 0.5, "flat"),
        # What may be more than three margins is not flat.
        (0.0, 54.9, "flat"),
        (0.0, 55.2, "inconclusive"),
    ],
)
def test_what_rises_from_pass_to_pass_and_not_with_the_level_drifts(
    drift, error, verdict
):
    drifting = replace(fit_of(LEVEL, drift=drift), drift_error=error)
    assert judged(drifting).verdict == verdict


def test_what_drifts_and_may_grow_as_well_is_not_known():
    """Not "with time, not with |cache|" beside an interval that says it may."""
    maybe = fit_of([100, 100, 100, 100, 100 + MARGIN], drift=90.0)
    assert judged(maybe).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("age", "error", "verdict"),
    [(37.0, 0.5, "drifts"), (36.9, 0.5, "flat"), (-90.0, 0.5, "flat")],
)
def test_what_rises_with_the_time_since_a_reset_drifts_by_age(age, error, verdict):
    aged = replace(fit_of(LEVEL), age=age, age_error=error)
    assert judged(aged).verdict == verdict
    assert (judged(aged).shape == "age") == (verdict == "drifts")


def test_what_rises_with_the_level_grows_whatever_drifts_besides():
    assert judged(fit_of(100 + 10 * X, drift=500)).verdict == "grows"


def test_what_grows_only_if_age_is_no_matter_is_not_known():
    grown = fit_of(100 + 10 * X)
    assert judged(replace(grown, aged=fit_of(100 + 9 * X))).verdict == "grows"
    assert judged(replace(grown, aged=fit_of(LEVEL))).verdict == "inconclusive"


def test_more_looks_ask_for_more_certainty():
    nearly = fit_of([100, 100, 100, 100, 100 + MARGIN - BOUND - 0.2])
    assert judged(nearly).verdict == "flat"
    assert judged(nearly, 0.99).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("low", "high", "judgement"),
    [
        ([0.1, 0.2], [0.3, 0.4], Judgement("flat")),
        # Each at the highest level is beyond each at the lowest, by the margin.
        ([0.1, 0.2], [0.5, 0.9], Judgement("grows")),
        ([0.1, 0.3], [0.5, 9.0], Judgement("flat")),
        # A single event may be disturbed: another server tells.
        ([0.1], [9.0], Judgement("inconclusive", TO_CONFIRM)),
    ],
)
def test_events_grow_where_each_takes_more_by_the_margin(low, high, judgement):
    assert judge_events(np.array(low), np.array(high), 0.25) == judgement


@pytest.mark.parametrize(
    ("chance", "verdict"), [(0.0009, "grows"), (0.001, "flat"), (1.0, "flat")]
)
def test_long_steps_that_come_more_often_than_by_chance_grow(chance, verdict):
    assert judge_rare(RareSteps(1_000.0, [9], [1], chance))["rare"].verdict == verdict
    assert judge_rare(None) == {}


@pytest.mark.parametrize(
    ("count", "verdict"), [(0, "flat"), (1, "flat"), (2, "stalls")]
)
def test_two_long_calls_are_a_stall(count, verdict):
    calls = LongCalls(count, 50.0, 0.1, 1_000)
    assert judge_long_calls(calls)["long calls"].verdict == verdict
    assert judge_long_calls(None) == {}


FLAT, GROWS, OPEN = Judgement("flat"), Judgement("grows"), Judgement("inconclusive")


@pytest.mark.parametrize(
    ("tpot", "servers", "verdict"),
    [(FLAT, 1, "inconclusive"), (FLAT, 2, "grows"), (GROWS, 1, "grows")],
)
def test_cpu_time_alone_convicts_with_two_servers_only(tpot, servers, verdict):
    of = confirmed({"processes": GROWS, "tpot": tpot, "calls": FLAT}, servers)
    assert of["processes"].verdict == verdict
    assert overall_verdict(of, {"calls"}) == verdict


DECISIVE = {name for name, metric in METRICS.items() if metric.decides}
ALL_FLAT = dict.fromkeys(DECISIVE, FLAT)


@pytest.mark.parametrize("part", sorted(DECISIVE))
def test_flat_needs_all_that_decides_to_be_there_and_flat(part):
    assert overall_verdict(ALL_FLAT, DECISIVE) == "flat"
    for verdict in ("grows", "drifts", "inconclusive"):
        of = ALL_FLAT | {part: Judgement(verdict)}
        assert overall_verdict(of, DECISIVE) == verdict
    others = {name: FLAT for name in DECISIVE - {part}}
    assert overall_verdict(others, DECISIVE) == "inconclusive"
    # Growth is growth, whatever else is missing.
    assert overall_verdict(others | {"rare": GROWS}, DECISIVE) == "grows"


@pytest.mark.parametrize("other", ["tpot", "processes", "rare", "hit", "memory"])
def test_anything_that_grows_convicts_and_what_is_noisy_has_a_bound_beside_it(other):
    assert overall_verdict(ALL_FLAT | {other: GROWS}, DECISIVE) == "grows"
    assert overall_verdict(ALL_FLAT | {other: OPEN}, DECISIVE) == "flat"


def test_memory_that_rises_from_pass_to_pass_drifts():
    leaks = ALL_FLAT | {"memory": Judgement("drifts")}
    assert overall_verdict(leaks, DECISIVE) == "drifts"


def test_a_stall_is_said_before_a_drift_and_after_growth():
    stalls = ALL_FLAT | {"long calls": Judgement("stalls")}
    assert overall_verdict(stalls, DECISIVE) == "stalls"
    assert overall_verdict(stalls | {"calls": GROWS}, DECISIVE) == "grows"


def test_no_levels_are_no_verdict():
    assert overall_verdict({}, ()) == "inconclusive"
    assert overall_verdict({"rare": FLAT}, ()) == "inconclusive"
