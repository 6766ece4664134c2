# SPDX-License-Identifier: Apache-2.0
"""An interval of a comparison holds what differs between runs, and no verdict hides it.

Arms are simulated whose true difference is known: sessions that differ, requests that
differ, and runs of which each is some percent slower or faster than the next.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.analyze.comparison import percent_differences, verdict
from fleet.analyze.runs import Alike, RunSpread, Spreads
from fleet.analyze.sessions import SessionDraws

pytestmark = pytest.mark.slow

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
    found = percent_differences(requests, "base", "other", draws, spreads)
    reach = spreads.reach_percent("other", "base", "tpot_ms", "p50")
    return found["tpot_ms"]["p50"]["ci95"], reach


@pytest.mark.parametrize("between", [0.02, 0.1, 0.2])
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


def test_equal_arms_get_no_verdict_though_their_runs_differ_by_10_percent() -> None:
    rng = np.random.default_rng(5)
    said = [
        verdict({"ci95": ci95}, reach)
        for _ in range(TRIALS)
        for ci95, reach in [interval(simulated(rng, 2, 0.1, 0.1, slower=1))]
    ]
    assert said.count("higher") + said.count("lower") <= 0.02 * TRIALS


def test_a_large_difference_is_seen_though_runs_differ() -> None:
    rng = np.random.default_rng(6)
    ci95, reach = interval(simulated(rng, 2, 0.05, 0.05, slower=3))
    assert verdict({"ci95": ci95}, reach) == "higher"


ends = st.floats(-99, 900, allow_nan=False)


@given(ends, ends, ends, ends)
def test_no_verdict_where_an_end_lies_within_the_reach(
    a: float, b: float, c: float, d: float
) -> None:
    ci95, reach = sorted([a, b]), [-abs(c), abs(d)]
    said = verdict({"ci95": ci95}, reach)
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
    assert verdict({"ci95": ci95}, reach) == "undecided"
