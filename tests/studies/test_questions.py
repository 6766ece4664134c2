# SPDX-License-Identifier: Apache-2.0
"""Arms are judged by the rule that the study's README states."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import polars as pl
import pytest
from kvtax_fleet.analyze.comparison import Paired

from kvtax.records import RecordsError
from kvtax.records.estimate import Estimate
from studies.harness import STUDIES
from studies.questions.__main__ import compared, earlier, levels, verdict


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


def test_answers_of_earlier_calls_stay_on_the_page(tmp_path: Path):
    committed = STUDIES / "questions" / "result.json"
    found = earlier(committed)
    text = json.loads(gzip.decompress(Path(f"{committed}.gz").read_bytes()))
    assert "routers_question" in found and "provenance" not in found
    again = json.loads(msgspec.json.encode(found))
    assert again == {name: {"levels": []} | text[name] for name in found}
    assert earlier(tmp_path / "none.json") == {}


def test_levels_are_over_all_orders_and_instances():
    """Two orders of four requests: three at one instance, a second apart."""
    rows = [
        {
            "arm": "linear@2",
            "repeat": repeat,
            "status": "ok",
            "window": "steady",
            "instance": "i1" if number == 3 else "i0",
            "sent_ns": number * 10**9,
            "end_ns": (number + 1) * 10**9,
            "input_tokens": 100,
            "usage_prompt_tokens": 100,
            "cached_tokens": 25 * number,
            "ttft_ms": float(number),
            "tpot_ms": 10.0,
        }
        for repeat in range(2)
        for number in range(4)
    ]
    (found,) = levels(pl.DataFrame(rows))
    assert (found.load, found.arm, found.requests_per_s) == (2, "linear", 1.0)
    assert found.tpot_ms == [10, 10, 10] and found.ttft_ms[2] == 3
    assert (found.cached_percent, found.most_to_mean) == (37.5, 1.5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"provenance": {}, "a": 1}'])
def test_another_file_is_not_taken_for_the_page(tmp_path: Path, text: str):
    other = tmp_path / "other.json"
    other.write_text(text)
    with pytest.raises(RecordsError, match="take another --out"):
        earlier(other)
