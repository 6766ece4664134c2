# SPDX-License-Identifier: Apache-2.0
"""Arms in virtual time: each request is compared with itself."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from made_frames import requests

from fleet.analyze.paired import paired

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
    found = paired(two_arms(values, values), "a", "b")["e2e_ms"]
    assert found["n"] == values.size
    assert found["percent"] == {"value": 0.0, "ci95": [0.0, 0.0]}
    assert found["faster"] == {"value": 0.0, "ci95": [0.0, 0.0]}


def test_half_a_percent_is_seen_through_any_noise_that_both_have() -> None:
    values = lively(2)
    found = paired(two_arms(1.005 * values, values), "a", "b")["e2e_ms"]
    assert found["percent"] == {"value": 0.5, "ci95": [0.5, 0.5]}
    faster = paired(two_arms(0.995 * values, values), "a", "b")["e2e_ms"]["faster"]
    assert faster == {"value": 100.0, "ci95": [100.0, 100.0]}


@pytest.mark.slow
def test_intervals_hold_the_truth_where_sessions_are_hit_differently() -> None:
    """By 10 % on average, more or less per session and repeat: 95 % of 100 hold it."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        shape = (REPEATS, SESSIONS, 1)
        factors = rng.normal(1.1, 0.1, (1, SESSIONS, 1)) + rng.normal(0, 0.05, shape)
        theirs = rng.lognormal(5, 0.3, (REPEATS, SESSIONS, TURNS))
        found = paired(two_arms(factors * theirs, theirs), "a", "b")["e2e_ms"]
        low, high = found["percent"]["ci95"]
        held += low <= 10 <= high
    assert 88 <= held <= 100


def test_one_repeat_has_no_interval() -> None:
    values = lively(4)[:1]
    found = paired(two_arms(1.1 * values, values), "a", "b")["e2e_ms"]["percent"]
    assert found == {"value": 10.0, "ci95": None}


def test_only_requests_that_ended_ok_in_both_are_compared() -> None:
    values = lively(5)
    lost = pl.col("arm").eq("a") & pl.col("session").eq("s0")
    frame = two_arms(values, values).with_columns(
        status=pl.when(lost).then(pl.lit("failed")).otherwise("status")
    )
    found = paired(frame, "a", "b")["e2e_ms"]
    assert found["n"] == values.size - REPEATS * TURNS
