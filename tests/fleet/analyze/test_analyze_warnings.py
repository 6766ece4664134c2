# SPDX-License-Identifier: Apache-2.0
"""A report says what makes its run doubtful, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtax.fleet.analyze.fleet_warnings import REMEDIES
from tests.fleet.analyze.analyze_runs import Truth, analysed


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
        ("record_incomplete", {"misplaced": 3}),
    ],
)
def test_a_doubt_is_told_and_only_that(tmp_path: Path, kind: str, fault: dict) -> None:
    analysis, text = analysed(tmp_path, Truth("linear", repeats=1, **fault))
    told = analysis.document["warnings"]
    assert {one["kind"] for one in told} == {kind}
    assert f"**{kind.replace('_', ' ')}**" in text
    assert f"  - **What to do:** {REMEDIES[kind]}" in text


def test_lookups_that_were_counted_again_are_named_as_the_cause(
    tmp_path: Path,
) -> None:
    """A request that waits for KV blocks is looked up again in every step."""
    again = Truth("linear", repeats=1, hidden_hits=200_000, hidden_queries=250_000)
    _, text = analysed(tmp_path / "again", again)
    assert "looked requests up more than once" in text
    _, text = analysed(tmp_path / "hits", replace(again, hidden_queries=0))
    assert "looked requests up more than once" not in text
