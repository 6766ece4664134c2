# SPDX-License-Identifier: Apache-2.0
"""Arms are judged by the rule that docs/fleet/questions.md states."""

from __future__ import annotations

import polars as pl
import pytest

from benchmarks.questions import compared, verdict
from kvtax.fleet.analyze.comparison import Paired
from kvtax.records.estimate import Estimate


@pytest.mark.parametrize(
    ("percent", "interval", "word"),
    [
        (5.0, [0.1, 9.9], "worse"),
        (-5.0, [-9.9, -0.1], "better"),
        (4.9, [4.8, 5.0], "no difference that matters"),
        (20.0, [-1.0, 41.0], "no difference that matters"),
        (20.0, None, "undecided"),
    ],
)
def test_a_difference_matters_from_5_percent_with_0_outside(percent, interval, word):
    found = Estimate(percent, interval)
    assert verdict(Paired(9, found, Estimate(0.0, None))) == word


def test_arms_are_compared_with_the_first_and_as_the_expectations_say():
    rows = [
        {
            "arm": f"{arm}@{load}",
            "repeat": repeat,
            "id": f"{session}",
            "session": f"s{session}",
            "status": "ok",
            "window": "steady",
            "ttft_ms": 10.0 * factor,
            "tpot_ms": 1.0 * factor,
            "e2e_ms": 100.0 * factor + session,
        }
        for load in (2, 6)
        for arm, factor in (("linear", 1), ("lmetric", 2), ("dynamo", 3))
        for repeat in range(3)
        for session in range(40)
    ]
    found = compared(pl.DataFrame(rows))
    pairs = [("lmetric", "linear"), ("dynamo", "linear"), ("dynamo", "lmetric")]
    assert [(row.load, row.arm, row.against) for row in found] == [
        (load, *pair) for load in (2, 6) for pair in pairs
    ]
    assert [row.ttft.value for row in found[:3]] == [100, 200, 50]
    assert {row.verdict for row in found} == {"worse"}
