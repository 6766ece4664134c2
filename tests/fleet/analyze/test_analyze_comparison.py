# SPDX-License-Identifier: Apache-2.0
"""Quantiles, their intervals, and the difference between two arms."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from made_frames import AB, requests

from fleet.analyze.common import same_requests
from fleet.analyze.comparison import percent_differences
from fleet.analyze.runs import Alike, Spreads
from fleet.analyze.sessions import MIN_SESSIONS, SessionDraws
from lab.stats.interval import stated


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Sessions of 5 requests that share an offset: 95 % of 150 intervals hold 10."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(150):
        offsets = rng.normal(10, 2, 60)
        values = (offsets[:, None] + rng.normal(0, 1, (60, 5))).ravel()
        sessions = pl.Series([f"s{i}" for i in range(60) for _ in range(5)])
        found = SessionDraws(sessions).quantiles(pl.Series(values), sessions)
        low, high = found["p50"].ci95
        held += low <= 10 <= high
    assert 0.88 <= held / 150 <= 0.995


def test_few_sessions_give_a_value_and_no_interval() -> None:
    few = MIN_SESSIONS - 1
    sessions = pl.Series([f"s{i}" for i in range(few) for _ in range(20)])
    values = pl.Series(np.arange(few * 20.0))
    found = SessionDraws(sessions).quantiles(values, sessions)
    assert stated(found["p50"], 4)["ci95"] is None
    assert stated(found["p50"], 4)["value"] == (few * 20) // 2 - 1


def test_a_p99_of_few_requests_is_not_stated() -> None:
    sessions = pl.Series([f"s{i}" for i in range(99)])
    found = SessionDraws(sessions).quantiles(pl.Series(np.arange(99.0)), sessions)
    assert found["p99"] is None
    assert found["p90"] is not None


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
    assert levels["p50"] == {"value": 0.0, "ci95": None}
