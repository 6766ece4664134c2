# SPDX-License-Identifier: Apache-2.0
"""Levels, slopes and speeds of two runs beside each other, worked out by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from kvtax.records.per_config import (
    BaselineDifference,
    ConfigEntry,
    ConfigEvidence,
    HeldLevels,
    NoiseFloor,
    PerConfig,
    WindowRecord,
)
from kvtax.records.run import RunRecord
from kvtax.stats import Estimate
from kvtax.verdict.aims import Check, Outcome, headline
from kvtax.verdict.roles import Roles
from kvtax.verdict.run_changes import (
    cautions,
    change,
    got_worse,
    other_window,
    p50_us,
    speed,
    times_baseline,
)
from kvtax.verdict.warnings import (
    config_warnings,
    growth_alone,
    interrupted_share,
    run_warnings,
)
from tests.microbench.synthetic import PROFILE
from tests.verdict.conftest import hold


def entry(p50: float | None = None, **fields: Any) -> ConfigEntry:
    needed = {"slope_us_per_1k_blocks": {}, "verdict_of": {"schedule": "flat"}}
    needed |= {
        "requests": {"scheduled": 10, "ok": 10, "failed": 0, "cancelled": 0},
        "records": {"engine_steps": 1_000, "engine_without_worker": 0, "torn_lines": 0},
        "lag_ms": None,
        "n_window_steps": 1_000,
        "schedule_us": p50 and {"p50": p50},
    }
    return ConfigEntry(**needed | fields)


def run(
    plain_us: float = 100.0,
    mine_us: float = 150.0,
    slope: tuple[float, float, float] = (10.0, 8.0, 13.0),
    floor: float = 0.0,
    slope_floor: float = 0.0,
    cache_blocks: int = 1_000,
) -> PerConfig:
    """A baseline, and a config 4 us below to 6 us above its difference from it."""
    apart = mine_us - plain_us
    difference = BaselineDifference(apart, (apart - 4, apart + 6), within_noise=False)
    value, low, high = slope
    mine = entry(
        mine_us,
        vs_plain={"schedule": difference},
        slope_us_per_1k_blocks={"schedule": Estimate(value, (low, high))},
    )
    noise = NoiseFloor(
        ("plain", "twin"),
        {"schedule": Estimate(slope_floor, (slope_floor - 1, slope_floor + 1))},
        {"schedule": Estimate(floor, (floor - 2, floor + 2))},
    )
    window = WindowRecord(at_cache_blocks=cache_blocks, requests_to_fill=None)
    return PerConfig(
        provenance={},
        profile=PROFILE,
        window=window,
        noise_floor=noise,
        warnings=[],
        configs={"plain": entry(plain_us), "mine": mine},
    )


@pytest.mark.parametrize(
    ("floor", "ci95"),
    [(0.0, (146.0, 156.0)), (5.0, (145.0, 156.0)), (9.0, (141.0, 159.0))],
)
def test_a_level_is_known_as_its_difference_and_no_better_than_the_twins(floor, ci95):
    document = run(floor=floor)
    assert p50_us(document, "mine", "schedule") == Estimate(150.0, ci95)
    low, high = ci95
    times = times_baseline(document, "mine", "schedule")
    assert times == Estimate(1.5, (low / 100, high / 100))


def test_the_baseline_is_known_as_its_difference_from_its_twin():
    known = p50_us(run(floor=0.5), "plain", "schedule")
    assert known == Estimate(100.0, (98.0, 102.0))
    assert p50_us(run(), "mine", "step") is None


def test_a_level_is_a_multiple_of_the_baseline_whatever_the_machine():
    # 1.25 times as slow; the config would take 187.5 us, and takes 225.
    old, new = run(100.0, 150.0), run(125.0, 225.0)
    assert speed(old, new, "schedule") == 1.25
    found = change(old, new, "mine", "schedule")
    assert found.times_old.value == pytest.approx(1.2)
    # Down to 4 / 225 below and 6 / 150 above; up to 6 / 225 and 4 / 150.
    low, high = (0.01778**2 + 0.04**2) ** 0.5, (0.02667**2 + 0.02667**2) ** 0.5
    assert found.times_old.ci95 == pytest.approx(
        (1.2 * (1 - low), 1.2 * (1 + high)), rel=1e-4
    )
    assert found.level_changed
    # The same, and where equal configs differ by as much.
    for unchanged in (run(125.0, 187.5), run(125.0, 225.0, floor=60.0)):
        assert not change(old, unchanged, "mine", "schedule").level_changed
    assert change(old, new, "plain", "schedule").times_old is None


@pytest.mark.parametrize(
    ("now", "slope_floor", "expected", "changed"),
    [
        # Half the speed: 30 are 15, 5 more. Ends: hypot(1, 3) below, hypot(2, 2) above.
        ((30.0, 28.0, 34.0), 0.0, (5.0, 5 - 10**0.5, 5 + 8**0.5), True),
        ((30.0, 28.0, 34.0), 4.9, (5.0, 5 - 10**0.5, 5 + 8**0.5), True),
        ((30.0, 28.0, 34.0), 5.1, (5.0, 5 - 10**0.5, 5 + 8**0.5), False),
        ((24.0, 22.0, 28.0), 0.0, (2.0, 2 - 10**0.5, 2 + 8**0.5), False),
        ((10.0, 8.0, 14.0), 0.0, (-5.0, -5 - 10**0.5, -5 + 8**0.5), True),
    ],
)
def test_a_slope_is_compared_at_the_baselines_speed_in_old(
    now, slope_floor, expected, changed
):
    old, new = run(), run(200.0, 300.0, now, slope_floor=slope_floor)
    found = change(old, new, "mine", "schedule")
    value, low, high = expected
    assert found.slope.value == pytest.approx(value)
    assert found.slope.ci95 == pytest.approx((low, high))
    assert found.slope_changed == changed


@pytest.mark.parametrize(
    ("blocks", "comparable"), [(950, True), (1_050, True), (949, False), (1_051, False)]
)
def test_levels_are_compared_within_5_percent_of_the_cache(blocks, comparable):
    old, new = run(), run(cache_blocks=blocks)
    assert (other_window(old, new) is None) == comparable
    assert (change(old, new, "mine", "schedule").times_old is not None) == comparable


@pytest.mark.parametrize(
    ("plain_us", "doubtful"),
    [(149.0, False), (151.0, True), (67.0, False), (66.0, True)],
)
def test_a_machine_half_as_slow_again_is_named(plain_us, doubtful):
    reasons = cautions(run(), run(plain_us, plain_us + 50))
    assert any("machine's speed" in reason for reason in reasons) == doubtful


VERDICTS = ["flat", "drifts", "grows", "failed"]


@pytest.mark.parametrize("before", VERDICTS)
@pytest.mark.parametrize("after", VERDICTS)
def test_verdicts_have_an_order(before, after):
    worse = VERDICTS.index(after) > VERDICTS.index(before)
    assert got_worse(entry(verdict=before), entry(verdict=after)) == worse
    unsure = entry(verdict="inconclusive")
    assert not got_worse(entry(verdict=before), unsure)


RECORDS = {"engine_steps": 1_000, "engine_without_worker": 0, "torn_lines": 0}
REQUESTS = {"scheduled": 10, "ok": 10, "failed": 0, "cancelled": 0}
HELD: dict[str, Any] = {"held": {"schedule": None}}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        (HELD, set()),
        ({}, {"no_slope"}),
        (HELD | {"error": "r0: it died"}, {"trials_failed"}),
        (HELD | {"n_window_steps": 199}, {"few_steps"}),
        (HELD | {"n_window_steps": 200}, set()),
        (HELD | {"records": RECORDS | {"engine_without_worker": 10}}, set()),
        (
            HELD | {"records": RECORDS | {"engine_without_worker": 11}},
            {"no_worker_records"},
        ),
        (HELD | {"records": RECORDS | {"torn_lines": 1}}, {"torn_trial"}),
        (HELD | {"requests": REQUESTS | {"ok": 9}}, {"not_reconciled"}),
        (HELD | {"requests": REQUESTS | {"ok": 9, "failed": 1}}, {"requests_lost"}),
        (HELD | {"requests": REQUESTS | {"ok": 8, "cancelled": 2}}, {"requests_lost"}),
        (HELD | {"lag_ms": {"valid": False, "p99": 3, "budget": 2}}, {"sent_late"}),
        (HELD | {"lag_ms": {"valid": True, "p99": 1, "budget": 2}}, set()),
    ],
)
def test_a_config_is_doubted_for_what_its_records_lack(fields, kinds):
    doubted = entry(**fields)
    found = config_warnings(doubted, ConfigEvidence(facts=doubted))
    assert {warning.kind for warning in found} == kinds


@pytest.mark.parametrize(
    ("slow", "times", "warned"),
    [(1, 9.0, False), (2, 9.0, True), (2, 5.1, True), (2, 4.9, False)],
)
def test_more_than_a_hundredth_of_steps_that_take_five_times_as_long_are_told(
    slow, times, warned
):
    """Times of the median of steps of the same batch size, of 100 steps."""
    large = hold(
        steps=50, batch=16, step_us=[900.0 * times] * slow + [900.0] * (50 - slow)
    )
    steps = pl.concat([hold(steps=50), large])
    evidence = ConfigEvidence(facts=entry(), interrupted_share=interrupted_share(steps))
    kinds = {warning.kind for warning in config_warnings(entry(**HELD), evidence)}
    assert ("interrupted" in kinds) == warned


@pytest.mark.parametrize(
    ("least", "bound", "verdict", "warned"),
    [
        (2.1, 0.5, "flat", True),
        (1.9, 0.5, "flat", False),
        (2.9, 3.0, "flat", False),
        (3.1, 3.0, "flat", True),
        (9.0, 0.5, "grows", False),
        (9.0, 0.5, "drifts", False),
        (9.0, 0.5, "inconclusive", True),
    ],
)
def test_a_cost_that_rose_only_while_the_cache_first_filled_is_told(
    least, bound, verdict, warned
):
    added = Estimate(0.0, (-1.0, 1.0))
    levels = HeldLevels(
        [0, 1_000], [1.0, 1.0], added, bound, bound, 0.0, None, shape=None
    )
    one = entry(verdict=verdict, held={"schedule": levels})
    slope = Estimate(least + 1, (least, least + 9))
    found = growth_alone(one, {"schedule": slope, "overhead": None})
    assert [warning.kind for warning in found] == ["growth_alone"] * warned


@pytest.mark.parametrize(
    ("floor", "warned"), [(1.9, False), (2.1, True), (-1.9, False), (-2.1, True)]
)
def test_equal_configs_that_certainly_differ_are_named(floor, warned):
    noise = run(floor=floor).noise_floor
    record = RunRecord(provenance={}, profile=PROFILE, plan=[], configs={})
    kinds = [warning.kind for warning in run_warnings(record, Roles({}), noise)]
    assert kinds == ["equals_differ"] * warned
    kinds = [w.kind for w in run_warnings(record, Roles({}), NoiseFloor())]
    assert kinds == ["no_noise_floor"]
    dirty = RunRecord(
        provenance={"git_dirty": True}, profile=PROFILE, plan=[], configs={}
    )
    assert "uncommitted" in [w.kind for w in run_warnings(dirty, Roles({}), noise)]


def test_a_gate_says_how_many_limits_are_broken_and_undecided():
    def check(outcome: Outcome, fails: bool) -> Check:
        return Check("mine", "a slope", "at most 2", "3", outcome, fails)

    kept, unsure = check("kept", False), check("undecided", False)
    broken = check("broken", True)
    assert headline([kept, unsure, unsure, broken, kept]) == (
        "Cost gate: failed. 1 of 5 limits broken, 2 undecided"
    )
    assert headline([kept, unsure]).startswith("Cost gate: passed. 0 of 2")
    assert headline([kept, check("undecided", True)]).startswith("Cost gate: failed.")
