# SPDX-License-Identifier: Apache-2.0
"""Each metric of the analysis, against cases whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from fleet.tests.analyze.analyze_runs import AB, prom, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze.analysis import Migration
from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.cache import apc, belief
from kvtax_fleet.analyze.frames import NOTHING
from kvtax_fleet.analyze.instance_tables import migration_table
from kvtax_fleet.analyze.load import (
    GpuUse,
    Held,
    Imbalance,
    Skew,
    accumulation,
    gpu_use,
    hotspot,
    interference,
    ongoing_tokens,
    prefill_points,
    step_function,
    token_imbalance,
)
from kvtax_fleet.analyze.request_tables import outcomes
from kvtax_fleet.analyze.what_if import Link, migrations
from kvtax_fleet.experiment.machine import GPU_HEADER, gpu_row

SECOND = 10**9


intervals = st.lists(
    st.tuples(
        st.integers(0, 50), st.integers(1, 20), st.integers(1, 9), st.sampled_from(AB)
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@given(intervals, st.integers(0, 60), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_load_is_what_is_under_way_and_its_mean_over_an_interval_the_overlap(
    spans: list, start: int, length: int
) -> None:
    frame = pl.DataFrame(
        [
            {"start_ns": s, "end_ns": s + d, "weight": w, "instance": i}
            for s, d, w, i in spans
        ]
    )
    steps = step_function(frame, AB)
    for at, load in zip(steps.at_ns, steps.load, strict=True):
        for column, name in enumerate(AB):
            under_way = sum(w for s, d, w, i in spans if i == name and s <= at < s + d)
            assert load[column] == under_way
    mean = steps.mean_between("a", np.array([start]), np.array([start + length]))
    overlap = sum(
        w * max(0, min(s + d, start + length) - max(s, start))
        for s, d, w, i in spans
        if i == "a"
    )
    assert mean[0] == pytest.approx(overlap / length)


def test_imbalance_is_max_over_min_and_counts_a_prompt_where_it_was_computed() -> None:
    frame = requests(
        [
            {"instance": "a", "usage_completion_tokens": 20},
            {"instance": "a", "prefill_instance": "b", "usage_completion_tokens": 30},
        ]
    )
    imbalance = token_imbalance(frame, AB)
    assert imbalance == Imbalance({"a": 150, "b": 100}, 1.5)


def test_an_idle_instance_has_no_ratio() -> None:
    imbalance = token_imbalance(requests([{"instance": "a"}]), AB)
    assert imbalance.tokens["b"] == 0
    assert imbalance.max_over_min is None


def test_hotspot_is_time_weighted_and_ignores_idle_time() -> None:
    """1 s on one of two instances (2), 3 s on both alike (1), a gap of 6 s."""
    frame = requests(
        [
            {"instance": "a", "sent_ns": 0, "end_ns": SECOND},
            {"instance": "a", "sent_ns": 7 * SECOND, "end_ns": 10 * SECOND},
            {"instance": "b", "sent_ns": 7 * SECOND, "end_ns": 10 * SECOND},
        ]
    )
    assert hotspot(frame, AB) == Skew(1.25, 2.0)
    window = 7 * SECOND, 9 * SECOND
    assert hotspot(frame, AB, window) == Skew(1.0, 1.0)
    window = SECOND // 2, 8 * SECOND
    assert hotspot(frame, AB, window) == Skew(1.3333, 2.0)


def test_a_session_lives_where_its_last_request_went() -> None:
    """On a from 0 to 4 s (the pause counts), on b from 4 to 6 s."""
    frame = requests(
        [
            {"instance": "a", "sent_ns": 0, "end_ns": SECOND, "turn": 0},
            {"instance": "b", "sent_ns": 4 * SECOND, "end_ns": 6 * SECOND, "turn": 1},
        ]
    )
    added = accumulation(frame, AB)
    assert added.sessions["a"] == Held(0.67, 1)
    assert added.sessions["b"] == Held(0.33, 1)
    assert added.sessions_skew == Skew(2.0, 2.0)


def test_interference_finds_the_slope_that_was_put_in() -> None:
    """0.25 ms of TPOT for every 1,000 tokens in prefill, 8 ms without."""
    rng = np.random.default_rng(7)
    x = rng.uniform(0, 20, 600)
    points = pl.DataFrame(
        {
            "session": [f"s{i % 60}" for i in range(600)],
            "prefill_ktokens": x,
            "tpot_ms": 8 + 0.25 * x + rng.normal(0, 1, 600),
        }
    )
    slope = interference(points, SessionDraws(points["session"]))
    low, high = slope.slope_ms_per_ktoken.ci95
    assert low < 0.25 < high
    assert high - low < 0.08
    assert slope.base_ms == pytest.approx(8, abs=0.3)


def test_interference_sees_only_prefill_beside_the_decode() -> None:
    """10,000 new tokens for half of one decode at a, none at b."""
    decode = {"first_token_ns": 0, "end_ns": 4 * SECOND, "tpot_ms": 1.0}
    frame = requests(
        [
            {"instance": "a", "sent_ns": -1, "new_tokens": 0} | decode,
            {"instance": "b", "sent_ns": -1, "new_tokens": 0} | decode,
            {
                "instance": "a",
                "sent_ns": SECOND,
                "first_token_ns": 3 * SECOND,
                "end_ns": 3 * SECOND,
                "new_tokens": 10_000,
            },
        ]
    )
    ktokens = prefill_points(frame, AB)["prefill_ktokens"].to_list()
    assert ktokens == [5.0, 0.0]


def test_without_prefill_beside_it_there_is_no_slope() -> None:
    points = pl.DataFrame(
        {
            "session": [f"s{i}" for i in range(50)],
            "prefill_ktokens": np.zeros(50),
            "tpot_ms": np.ones(50),
        }
    )
    assert interference(points, SessionDraws(points["session"])) is None


def test_migrating_evens_out_two_long_sessions_on_one_instance() -> None:
    """Both begin after a long prompt elsewhere; in the end they have more tokens."""
    long = {"session": "long", "sent_ns": 0, "end_ns": 1}
    rows = [long | {"instance": "a", "usage_prompt_tokens": 18_000}]
    for turn in range(12):
        for session in ("s", "t"):
            at = SECOND * (1 + 10 * turn) + (session == "t")
            rows.append(
                {
                    "session": session,
                    "turn": turn,
                    "instance": "a",
                    "sent_ns": at,
                    "end_ns": at + 9 * SECOND,
                    "usage_prompt_tokens": 1_000 * turn + 1,
                    "usage_completion_tokens": 0,
                }
            )
    link = Link(kv_bytes_per_token=100_000, bandwidth_gbit_s=8)
    never, tenth, fifth, _ = migrations(requests(rows), AB, link)
    assert (never.migrations, tenth.migrations, fifth.migrations) == (0, 2, 1)
    assert fifth.max_over_min < tenth.max_over_min < never.max_over_min
    # The context before turn 5, x 100,000 bytes, over 1e9 bytes/s.
    assert fifth.moved_tokens == 4_001
    assert fifth.transfer_ms_total == pytest.approx(400.1)


def test_a_rule_that_no_session_is_long_enough_for_was_not_tried() -> None:
    """Sessions of eight turns never come to their eleventh."""
    rows = [
        {
            "session": s,
            "turn": turn,
            "instance": "a",
            "sent_ns": turn,
            "end_ns": turn + 1,
        }
        for s in AB
        for turn in range(8)
    ]
    link = Link(kv_bytes_per_token=1, bandwidth_gbit_s=1)
    policies = migrations(requests(rows), AB, link)
    chances = {rule.every_turns: rule.chances for rule in policies}
    assert chances == {None: 0, 10: 0, 5: 2, 2: 6}
    (table,) = migration_table(Migration("x", "m", 1, 1.0, policies))
    assert "Not tried: every 10 turns" in table.note
    assert [row[0] for row in table.rows] == ["never", "every 5 turns", "every 2 turns"]


def arm_of(before: str, after: str) -> ArmRun:
    return replace(NOTHING, counters={"a": (before, after)})


def test_apc_is_the_rise_of_the_counters() -> None:
    frame = requests([{"instance": "a", "cached_tokens": 300}])
    hits = apc(arm_of(prom(5_000, 1_200), prom(6_000, 1_500)), frame)
    assert hits.instances["a"].apc == hits.overall.apc == 0.3
    assert hits.overall.agrees


def test_a_failed_request_may_explain_hits_that_no_usage_tells() -> None:
    counters = arm_of(prom(100, 100), prom(1_100, 900))
    reported = {"instance": "a", "cached_tokens": 300}
    lost = {"instance": "a", "status": "failed", "input_tokens": 500}
    assert apc(counters, requests([reported, lost])).overall.agrees is True
    assert apc(counters, requests([reported])).overall.agrees is False


def test_counters_that_went_back_give_no_apc() -> None:
    frame = requests([{"instance": "a", "cached_tokens": 300}])
    hits = apc(arm_of(prom(5_000, 1_200), prom(6_000, 900)), frame)
    assert hits.overall.apc is None
    assert hits.instances["a"].queries is None


def test_an_arm_that_offloads_cannot_be_checked() -> None:
    row = {"instance": "a", "prefill_instance": "b", "cached_tokens": 0}
    hits = apc(arm_of(prom(100, 100), prom(1_100, 900)), requests([row]))
    assert hits.overall.agrees is None


def test_under_way_are_prompt_and_asked_output_and_prefill_elsewhere() -> None:
    frame = requests(
        [
            {
                "instance": "a",
                "prefill_instance": "b",
                "sent_ns": 10,
                "first_token_ns": 14,
                "end_ns": 20,
                "output_tokens": 7,
            },
            {"instance": "a", "sent_ns": None, "first_token_ns": None, "end_ns": 30},
        ]
    )
    steps = step_function(ongoing_tokens(frame), AB)
    assert steps.at_ns.tolist() == [10, 14, 20]
    assert steps.load.tolist() == [[107, 100], [107, 0], [0, 0]]


def test_belief_is_told_apart_by_its_error_and_skips_prompts_from_elsewhere() -> None:
    pairs = [(100, 100), (116, 100), (500, 100), (0, 100)]
    rows = [{"believed_cached": b, "cached_tokens": c} for b, c in pairs]
    elsewhere = {"believed_cached": 0, "cached_tokens": 900, "prefill_instance": "b"}
    believed = belief(requests([*rows, elsewhere]), block_tokens=16)
    shares = believed.n, believed.exact, believed.too_high, believed.too_low
    assert shares == (4, 0.5, 0.25, 0.25)
    assert believed.mean_error_tokens == (16 + 400 - 100) / 4


def test_failure_modes_are_listed_most_frequent_first() -> None:
    rows = [{"status": "failed", "error": e} for e in ("rare", "often", "often")]
    counts = outcomes(requests([*rows, {"fallback": "cap"}]))["x"]
    modes = counts.modes
    assert counts.fallbacks == {"cap": 1}
    assert list(modes.items()) == [("failed: often", 2), ("failed: rare", 1)]


def test_gpu_use_is_taken_while_requests_were_under_way(tmp_path: Path) -> None:
    rows = [
        gpu_row(at, f"0, {busy}, {memory}, 100, 1500")
        for at, busy, memory in ((5, 100, 90), (15, 40, 10), (25, 60, 30), (99, 0, 0))
    ]
    (tmp_path / "gpu.csv").write_text("\n".join([GPU_HEADER, *rows]) + "\n")
    requests = pl.DataFrame({"sent_ns": [10, 20], "end_ns": [18, 30]})
    assert gpu_use(tmp_path, requests) == {
        "0": GpuUse(
            samples=2,
            utilization_percent=50.0,
            memory_used_mib_max=30.0,
            power_w=100.0,
        )
    }
