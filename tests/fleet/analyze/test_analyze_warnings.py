# SPDX-License-Identifier: Apache-2.0
"""A report says what makes its run doubtful, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from analyze_runs import Truth, analysed

from fleet.analyze.warn import REMEDIES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "truth"),
    [
        ("failures", Truth("linear", repeats=1, fails=5)),
        ("apc_disagrees", Truth("linear", repeats=1, hidden_hits=200_000)),
        ("not_fresh", Truth("linear", repeats=1, fresh=False)),
        ("held", Truth("linear", repeats=1, held=3)),
        ("lag", Truth("linear", repeats=1, valid=False)),
        ("machine_saturated", Truth("linear", repeats=1, saturated="cores busy")),
        ("few_sessions", Truth("linear", repeats=1, sessions=10)),
        ("tokens_disagree", Truth("linear", repeats=1, short_answers=5)),
        ("top_sessions", Truth("linear", repeats=1, giants=5)),
        ("arm_failed", Truth("linear", repeats=1, status="failed")),
        ("drain", Truth("linear", repeats=1, steady_share=0.5)),
        ("record_incomplete", Truth("linear", repeats=1, misplaced=3)),
    ],
)
def test_a_doubt_is_told_and_only_that(tmp_path: Path, kind: str, truth: Truth) -> None:
    analysis, text = analysed(tmp_path, truth)
    told = analysis.document["warnings"]
    assert {one["kind"] for one in told} == {kind}
    assert f"**{kind.replace('_', ' ')}**" in text
    _, _, after = text.partition(f"**{kind.replace('_', ' ')}**")
    last = after.split("\n- ")[0].split("\n\n")[0].splitlines()[-1]
    assert last == f"  - **What to do:** {REMEDIES[kind]}"


def test_lookups_that_were_counted_again_are_named_as_the_cause(
    tmp_path: Path,
) -> None:
    """A request that waits for KV blocks is looked up again in every step."""
    again = Truth("linear", repeats=1, hidden_hits=200_000, hidden_queries=250_000)
    _, text = analysed(tmp_path / "again", again)
    assert "looked requests up more than once" in text
    _, text = analysed(tmp_path / "hits", replace(again, hidden_queries=0))
    assert "looked requests up more than once" not in text
