# SPDX-License-Identifier: Apache-2.0
"""Doubts, and comparisons that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleet.tests.analyze.analyze_runs import Truth, analysed, write_run
from kvtax.records.warning import RunWarning

from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.fleet_report import answers
from kvtax_fleet.analyze.fleet_warnings import REMEDIES
from kvtax_fleet.analyze.refusals import found_warm, refusals


def pair(folder: Path, **worse) -> list:
    """Two arms; `worse` is what is wrong with the second one."""
    base = {"policy": "linear", "concurrency": 2, "baseline": "a"}
    arms = [Truth("a", **base), Truth("b", **(base | {"policy": "lmetric"} | worse))]
    return read_run(write_run(folder, arms))


def test_arms_that_differ_in_their_policy_alone_are_compared(tmp_path):
    assert refusals(pair(tmp_path), "b", "a") == []


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({"fresh": False}, "cold caches"),
        ({"status": "failed"}, "the run failed"),
        ({"saturated": "cores"}, "did not keep up"),
        ({"valid": False}, "sent late"),
        ({"fails": 1}, "did not end ok differ"),
        ({"sessions": 39}, "requests differ"),
        ({"repeats": 1}, "repeats are not the same"),
        ({"concurrency": 8}, "concurrency differs"),
    ],
)
def test_a_comparison_is_refused_with_the_reason(worse, what, tmp_path):
    runs = pair(tmp_path, **worse)
    for arm, baseline in (("a", "b"), ("b", "a")):
        assert any(what in reason for reason in refusals(runs, arm, baseline))


def test_an_arm_that_did_not_run_is_not_compared(tmp_path):
    assert refusals(pair(tmp_path), "c", "a") == ["there is no run of c"]


def test_a_warm_instance_shows_in_the_records_alone(tmp_path):
    """Counters can be reset; what a request found cached was there."""
    requests = pair(tmp_path)[0].requests
    assert found_warm(requests) is None
    first = min(requests, key=lambda request: request.sent_ns)
    first.cached_tokens = 512
    assert f"{first.instance} found 512 tokens" in found_warm(requests)
    first.prefill_instance = "another"
    assert found_warm(requests) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("failures", {"fails": 5}),
        ("apc_disagrees", {"hidden_hits": 200_000}),
        ("not_fresh", {"fresh": False}),
        ("held", {"held": 3}),
        ("lag", {"valid": False}),
        ("machine_saturated", {"saturated": "cores busy"}),
        ("few_sessions", {"sessions": 10}),
        ("tokens_disagree", {"short_answers": 5}),
        ("top_sessions", {"giants": 5}),
        ("arm_failed", {"status": "failed"}),
        ("drain", {"steady_share": 0.5}),
    ],
)
def test_a_doubt_is_told_and_only_that(tmp_path: Path, kind: str, fault: dict) -> None:
    analysis, text = analysed(tmp_path, Truth("linear", repeats=1, **fault))
    warnings = analysis.document["warnings"]
    assert {warning["kind"] for warning in warnings} == {kind}
    assert f"**{kind.replace('_', ' ')}**" in text
    assert f"  - **What to do:** {REMEDIES[kind]}" in text


@pytest.mark.slow
def test_lookups_that_were_counted_again_are_named_as_the_cause(
    tmp_path: Path,
) -> None:
    """A request that waits for KV blocks is looked up again in every step."""
    again = Truth("linear", repeats=1, hidden_hits=200_000, hidden_queries=250_000)
    _, text = analysed(tmp_path / "again", again)
    assert "looked requests up more than once" in text
    _, text = analysed(tmp_path / "hits", replace(again, hidden_queries=0))
    assert "looked requests up more than once" not in text


def test_doubts_are_named_before_the_first_number() -> None:
    doubt = RunWarning("few_sessions", "a", "two sessions", "take more")
    results = SimpleNamespace(
        warnings=[SimpleNamespace(kind="k", message="m", remedy="r")],
        comparisons=[SimpleNamespace(arm="b", baseline="a", refused=["late"])],
        ranking=[
            SimpleNamespace(arm="a", concurrency=2, e2e_ms=7.0, verdict="the best")
        ],
    )
    results.warnings[0].warning = lambda: doubt
    first, *_, last = answers(results)
    assert first == "- **Doubtful (few_sessions)**: two sessions"
    assert "7 ms" in last
