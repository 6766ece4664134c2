# SPDX-License-Identifier: Apache-2.0
"""Quantiles, their intervals, and the difference between two arms, in both times."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from fleet.tests.analyze.analyze_runs import AB, requests
from hypothesis import given
from hypothesis import strategies as st
from kvtax.records.estimate import Estimate
from kvtax.stats.processes import RunSpread
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze.comparison import (
    Alike,
    Spreads,
    paired,
    percent_differences,
    ratio_of_sums,
    verdict,
)
from kvtax_fleet.analyze.frames import estimate, same_requests


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Sessions of 5 requests that share an offset: 95 % of 150 intervals hold 10."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(150):
        offsets = rng.normal(10, 2, 60)
        values = (offsets[:, None] + rng.normal(0, 1, (60, 5))).ravel()
        sessions = pl.Series([f"s{i}" for i in range(60) for _ in range(5)])
        computed = SessionDraws(sessions).quantiles(pl.Series(values), sessions)
        low, high = computed["p50"].ci95
        held += low <= 10 <= high
    assert 0.88 <= held / 150 <= 0.995


def test_few_sessions_give_a_value_and_no_interval() -> None:
    few = 7
    sessions = pl.Series([f"s{i}" for i in range(few) for _ in range(20)])
    values = pl.Series(np.arange(few * 20.0))
    medians = SessionDraws(sessions).quantiles(values, sessions)
    assert estimate(medians["p50"], 4).ci95 is None
    assert estimate(medians["p50"], 4).value == (few * 20) // 2 - 1


def test_a_p99_of_few_requests_is_not_stated() -> None:
    sessions = pl.Series([f"s{i}" for i in range(99)])
    medians = SessionDraws(sessions).quantiles(pl.Series(np.arange(99.0)), sessions)
    assert medians["p99"] is None
    assert medians["p90"] is not None


def test_arms_are_compared_on_the_requests_that_all_of_them_have() -> None:
    rows = [
        {"id": f"r{i}", "arm": arm, "window": "steady"}
        for arm in AB
        for i in range(100)
    ]
    rows[0]["status"] = "failed"
    rows[1]["window"] = "drain"
    window, kept = same_requests(requests(rows))
    assert window == "steady"
    assert sorted(set(kept["id"])) == sorted(f"r{i}" for i in range(2, 100))


@pytest.mark.filterwarnings("error")
def test_a_share_of_a_baseline_that_can_be_zero_has_no_interval() -> None:
    """Stand-ins answer in one piece: their TPOT is 0 in many requests."""
    rows = [
        {"id": f"r{i}", "session": f"s{i}", "arm": arm, "repeat": r, "tpot_ms": tpot_ms}
        for r in range(2)
        for i in range(20)
        for arm, tpot_ms in (("a", float(i % 3 > 0)), ("b", 1.0))
    ]
    frame = requests(rows)
    draws = SessionDraws(frame["session"])
    spreads = Spreads(frame, {arm: Alike(1, arm) for arm in AB})
    levels = percent_differences(frame, "a", "b", draws, spreads)["tpot_ms"]
    assert levels["p50"] == Estimate(0.0)


SESSIONS, REPEATS, TURNS = 40, 4, 3


def two_arms(ours_ms: np.ndarray, theirs_ms: np.ndarray) -> pl.DataFrame:
    """E2E of arms `a` and `b`: (repeats, sessions, turns) each."""
    return requests(
        [
            {
                "id": f"{session}/{turn}",
                "session": f"s{session}",
                "arm": arm,
                "repeat": repeat,
                "window": "steady",
                "e2e_ms": value,
            }
            for arm, values in (("a", ours_ms), ("b", theirs_ms))
            for (repeat, session, turn), value in np.ndenumerate(values)
        ]
    )


def lively(seed: int) -> np.ndarray:
    """Latencies that differ a lot between repeats, sessions and turns."""
    rng = np.random.default_rng(seed)
    repeats = rng.lognormal(5, 0.5, (REPEATS, 1, 1))
    sessions = rng.lognormal(0, 1, (1, SESSIONS, 1))
    return repeats * sessions * rng.lognormal(0, 0.5, (REPEATS, SESSIONS, TURNS))


def test_equal_arms_do_not_differ_at_all() -> None:
    values = lively(1)
    e2e = paired(two_arms(values, values), "a", "b")["e2e_ms"]
    assert e2e.n == values.size
    assert e2e.percent == Estimate(0.0, (0.0, 0.0))
    assert e2e.faster == Estimate(0.0, (0.0, 0.0))


def test_half_a_percent_is_seen_through_any_noise_that_both_have() -> None:
    values = lively(2)
    e2e = paired(two_arms(1.005 * values, values), "a", "b")["e2e_ms"]
    assert e2e.percent == Estimate(0.5, (0.5, 0.5))
    faster = paired(two_arms(0.995 * values, values), "a", "b")["e2e_ms"].faster
    assert faster == Estimate(100.0, (100.0, 100.0))


@pytest.mark.slow
def test_intervals_hold_the_truth_where_sessions_are_hit_differently() -> None:
    """By 10 % on average, more or less per session and repeat: 95 % of 100 hold it."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        shape = (REPEATS, SESSIONS, 1)
        factors = rng.normal(1.1, 0.1, (1, SESSIONS, 1)) + rng.normal(0, 0.05, shape)
        theirs = rng.lognormal(5, 0.3, (REPEATS, SESSIONS, TURNS))
        e2e = paired(two_arms(factors * theirs, theirs), "a", "b")["e2e_ms"]
        low, high = e2e.percent.ci95
        held += low <= 10 <= high
    assert 88 <= held <= 100


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [2, 3, 5])
@pytest.mark.parametrize("of_session", [0.0, 0.1])
@pytest.mark.parametrize("of_run", [0.02, 0.2])
def test_a_paired_interval_holds_the_truth_though_orders_have_an_effect_of_their_own(
    repeats: int, of_session: float, of_run: float
) -> None:
    """At least 93 % of 300 intervals hold the true difference of 10 %."""
    rng = np.random.default_rng([repeats, int(100 * of_session), int(100 * of_run)])
    held = 0
    for _ in range(300):
        factors = 1.1 + rng.normal(0, of_run, (1, repeats))
        factors = factors + rng.normal(0, of_session, (SESSIONS, 1))
        theirs = rng.lognormal(5, 0.3, (SESSIONS, repeats))
        # Not the weighted mean of the factors that were drawn, but 1.1 is true.
        low, high = ratio_of_sums(factors * theirs, theirs).ci95
        held += low <= 1.1 <= high
    assert held / 300 >= 0.93


def test_one_repeat_has_no_interval() -> None:
    values = lively(4)[:1]
    percent = paired(two_arms(1.1 * values, values), "a", "b")["e2e_ms"].percent
    assert percent == Estimate(10.0)


def test_only_requests_that_ended_ok_in_both_are_compared() -> None:
    values = lively(5)
    lost = pl.col("arm").eq("a") & pl.col("session").eq("s0")
    frame = two_arms(values, values).with_columns(
        status=pl.when(lost).then(pl.lit("failed")).otherwise("status")
    )
    e2e = paired(frame, "a", "b")["e2e_ms"]
    assert e2e.n == values.size - REPEATS * TURNS


SESSIONS, TURNS = 30, 4
TRIALS = 100
WITHIN = (0.05, 0.3)
ARMS = {
    "base": Alike(8, "base"),
    "again": Alike(8, "base"),
    "other": Alike(8, "other"),
}


def simulated(
    rng: np.random.Generator, runs: int, between: float, within: float, slower: float
) -> pl.DataFrame:
    """The requests of ARMS in `runs` repeats; `other` is `slower` times as slow.

    `between` and `within`: standard deviation of the log from one run to the next, and
    from one request to the same request in another run.
    """
    sessions = np.repeat(rng.lognormal(0, 0.5, SESSIONS), TURNS)
    frames = []
    for arm in ARMS:
        for repeat in range(runs):
            noise = rng.lognormal(0, within, len(sessions))
            values = sessions * noise * rng.lognormal(0, between)
            frame = pl.DataFrame(
                {"tpot_ms": values * (slower if arm == "other" else 1)}
            )
            frames.append(
                frame.with_row_index("id").with_columns(
                    (pl.col("id") // TURNS).cast(pl.String).alias("session"),
                    pl.lit(arm).alias("arm"),
                    pl.lit(repeat).alias("repeat"),
                    pl.lit("ok").alias("status"),
                    pl.lit("steady").alias("window"),
                    pl.lit(None, pl.Float64).alias("ttft_ms"),
                    pl.lit(None, pl.Float64).alias("e2e_ms"),
                )
            )
    return pl.concat(frames)


def interval(requests: pl.DataFrame) -> tuple[list[float], list[float]]:
    """Interval of `other` against `base` in %, and the reach of the A/A pair."""
    draws, spreads = SessionDraws(requests["session"]), Spreads(requests, ARMS)
    differences = percent_differences(requests, "base", "other", draws, spreads)
    reach = spreads.reach_percent("other", "base", "tpot_ms", "p50")
    return differences["tpot_ms"]["p50"].ci95, reach


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.02, 0.2])
@pytest.mark.parametrize("runs", [2, 3])
def test_an_interval_holds_the_truth_whatever_differs_between_runs(
    runs: int, between: float
) -> None:
    """At least 93 % of the intervals hold the true difference of 20 %."""
    rng = np.random.default_rng([runs, int(1000 * between)])
    held = 0
    for trial in range(TRIALS):
        within = WITHIN[trial % len(WITHIN)]
        (low, high), _ = interval(simulated(rng, runs, between, within, slower=1.2))
        held += low <= 20 <= high
    assert held / TRIALS >= 0.93


@pytest.mark.slow
def test_equal_arms_get_no_verdict_though_their_runs_differ_by_10_percent() -> None:
    rng = np.random.default_rng(5)
    said = [
        verdict(Estimate(0.0, ci95), reach)
        for _ in range(TRIALS)
        for ci95, reach in [interval(simulated(rng, 2, 0.1, 0.1, slower=1))]
    ]
    assert said.count("higher") + said.count("lower") <= 0.02 * TRIALS


def test_a_large_difference_is_seen_though_runs_differ() -> None:
    rng = np.random.default_rng(6)
    ci95, reach = interval(simulated(rng, 2, 0.05, 0.05, slower=3))
    assert verdict(Estimate(0.0, ci95), reach) == "higher"


@pytest.mark.parametrize(
    ("ci95", "reach", "word"),
    [
        (None, [-5.0, 5.0], "undecided"),
        ((-1.0, 20.0), [-5.0, 5.0], "not shown to differ"),
        ((0.0, 20.0), [-5.0, 5.0], "not shown to differ"),
        ((5.1, 9.0), [-5.0, 5.0], "higher"),
        ((4.9, 9.0), [-5.0, 5.0], "within the noise floor"),
        ((5.0, 9.0), [-5.0, 5.0], "within the noise floor"),
        ((-9.0, -5.1), [-5.0, 5.0], "lower"),
        ((-9.0, -4.9), [-5.0, 5.0], "within the noise floor"),
        # The reach is of logarithms: further upwards than downwards.
        ((-9.0, -5.1), [-5.0, 9.5], "lower"),
        ((9.0, 12.0), [-5.0, 9.5], "within the noise floor"),
        ((0.1, 0.2), [0.0, 0.0], "higher"),
        ((0.1, 0.2), None, "higher (noise floor unknown)"),
        ((-0.2, -0.1), None, "lower (noise floor unknown)"),
    ],
)
def test_a_verdict_is_higher_or_lower_only_beyond_what_equal_arms_differ_by(
    ci95, reach, word
) -> None:
    assert verdict(Estimate(0.0, ci95), reach) == word


def runs_at(levels_ms: dict[str, list[float]]) -> pl.DataFrame:
    """Runs of each arm in which every request takes the same time."""
    return requests(
        [
            {
                "id": f"r{number}",
                "session": f"s{number % 10}",
                "arm": arm,
                "repeat": repeat,
                "window": "steady",
                "tpot_ms": level_ms,
            }
            for arm, levels in levels_ms.items()
            for repeat, level_ms in enumerate(levels)
            for number in range(60)
        ]
    )


def test_equal_arms_reach_as_far_as_their_runs_differ() -> None:
    """Logs 0.1 apart in two runs of each: 4 runs of one arm, 3 degrees of freedom.

    Their standard deviation is 0.1 / sqrt(3), and t is 3.1824. Two means of two runs
    are known to that, so the reach is 0.1837 in the logarithm.
    """
    up = 100 * np.exp(0.1)
    frame = runs_at(
        {"base": [100.0, up], "again": [up, 100.0], "other": [200.0, 300.0]}
    )
    spreads = Spreads(frame, ARMS)
    for arm in ("again", "other"):
        reach = spreads.reach_percent(arm, "base", "tpot_ms", "p50")
        assert reach == pytest.approx([-16.782, 20.166], abs=0.01)
    assert spreads.pairs == 1
    alone = Spreads(frame, {arm: Alike(8, arm) for arm in ARMS})
    assert alone.reach_percent("other", "base", "tpot_ms", "p50") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "percent"),
    [(150.0, 100.0, 50.0), (80.0, 100.0, -20.0), (100.0, 100.0, 0.0)],
)
def test_a_difference_is_in_percent_of_the_baseline(ours, theirs, percent) -> None:
    frame = runs_at({"base": [theirs, theirs], "other": [ours, ours]})
    draws = SessionDraws(frame["session"])
    spreads = Spreads(frame, {arm: Alike(8, arm) for arm in ("base", "other")})
    tpot = percent_differences(frame, "base", "other", draws, spreads)["tpot_ms"]
    assert tpot["p50"] == Estimate(percent, (percent, percent))


def test_pairs_compare_means_and_count_the_faster_requests() -> None:
    """In each of two repeats 10 sessions of 100 ms: half take 50 ms, half 170."""
    theirs = np.full((2, 10, 1), 100.0)
    ours = np.where(np.arange(10)[None, :, None] % 2, 50.0, 170.0) + np.zeros((2, 1, 1))
    e2e = paired(two_arms(ours, theirs), "a", "b")["e2e_ms"]
    back = paired(two_arms(theirs, ours), "a", "b")["e2e_ms"]
    # Arm a is `ours` and b the baseline: 110 on average, 10 of 20 are faster.
    assert (e2e.n, e2e.percent.value, e2e.faster.value) == (20, 10.0, 50.0)
    assert back.percent.value == pytest.approx(100 * (100 / 110 - 1), abs=1e-3)
    assert e2e.percent.low < 10.0 < e2e.percent.high


@pytest.mark.parametrize(
    ("steady", "n", "percent"),
    # 49 pairs in the steady window of both are too few to leave the others out.
    [(50, 50, 20.0), (49, 100, 10.0)],
)
def test_pairs_are_of_the_steady_window_if_it_has_enough(steady, n, percent) -> None:
    rows = [
        {
            "id": f"r{number}",
            "session": f"s{number % 10}",
            "arm": arm,
            "window": "steady" if number < steady else "drain",
            "e2e_ms": 120.0 if arm == "a" and number < 50 else 100.0,
        }
        for arm in AB
        for number in range(100)
    ]
    e2e = paired(requests(rows), "a", "b")["e2e_ms"]
    assert (e2e.n, e2e.percent.value) == (n, percent)


ends = st.floats(-99, 900, allow_nan=False)


@given(ends, ends, ends, ends)
def test_no_verdict_where_an_end_lies_within_the_reach(
    a: float, b: float, c: float, d: float
) -> None:
    ci95, reach = tuple(sorted([a, b])), [-abs(c), abs(d)]
    said = verdict(Estimate(0.0, ci95), reach)
    if said in ("higher", "lower"):
        assert not any(reach[0] <= end <= reach[1] for end in ci95)
        assert (ci95[0] > 0) == (said == "higher")
    else:
        assert ci95[0] <= reach[1] and reach[0] <= ci95[1]


def test_the_spread_is_pooled_and_equal_arms_are_one_arm() -> None:
    """Squares 2 of two runs and 8 of two more; three runs of a pair have 2 degrees."""
    apart = [np.array([0.0, 2.0]), np.array([1.0, 5.0]), np.array([3.0])]
    assert RunSpread.of(apart) == RunSpread(np.sqrt(10 / 2), 2)
    assert RunSpread.of([np.array([0.0, 1.0, 2.0])]) == RunSpread(1.0, 2)


def test_an_arm_whose_runs_differ_by_more_has_the_wider_interval() -> None:
    requests = simulated(np.random.default_rng(8), 2, 0.01, 0.05, slower=1)
    later = (pl.col("arm") == "other") & (pl.col("repeat") == 1)
    slower = requests.with_columns(
        pl.when(later).then(2 * pl.col("tpot_ms")).otherwise("tpot_ms").alias("tpot_ms")
    )
    draws, spreads = SessionDraws(slower["session"]), Spreads(slower, ARMS)
    widths = {}
    for arm in ("base", "other"):
        own = slower.filter(pl.col("arm") == arm)
        level = draws.quantiles(own["tpot_ms"], own["session"])["p50"]
        low, high = spreads.widened(level, arm, "tpot_ms", "p50").ci95
        widths[arm] = np.log(high / low)
    assert widths["other"] > 1.5 * widths["base"]


def test_one_run_of_each_arm_has_no_interval() -> None:
    """Nothing tells how much another run would differ."""
    requests = simulated(np.random.default_rng(7), 1, 0.1, 0.1, slower=2)
    requests = requests.filter(pl.col("arm") != "again")
    ci95, reach = interval(requests)
    assert ci95 is None
    assert reach is None
    assert verdict(Estimate(0.0, ci95), reach) == "undecided"
