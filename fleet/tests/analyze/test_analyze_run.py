# SPDX-License-Identifier: Apache-2.0
"""A run folder becomes a report that says what is true, and no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fleet.tests.analyze.analyze_runs import (
    INSTANCES,
    MODEL,
    SESSIONS,
    TURNS,
    Truth,
    analysed,
    text_of,
    write_run,
)
from kvtax.cli import Exit, main
from kvtax.records.estimate import Estimate

from kvtax_fleet.analyze.analysis import analyse
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.comparison import NO_DIFFERENCE, verdict
from kvtax_fleet.policies.decision import CLASSES

pytestmark = pytest.mark.slow

REPEATS = 2
N = SESSIONS * TURNS * REPEATS
TRUTHS = [
    Truth("linear"),
    Truth("linear_aa", same_as="linear"),
    Truth("slow", slower=1.2),
    Truth("lmetric", policy="lmetric"),
    Truth("noop", connector="noop", slower=1.02),
    Truth("mooncake", connector="mooncake_both", slower=1.15),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"), TRUTHS)
    assert main(["fleet", "analyze", str(folder), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "analysis.json").read_text())


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "report.md").read_text()


def compared(document: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(
        comparison for comparison in document["comparisons"] if comparison["arm"] == arm
    )


def test_every_request_and_every_instance_is_counted(document: dict[str, Any]) -> None:
    assert document["arms"]["linear"]["belief"]["exact"] == 1.0
    for entry in document["arms"].values():
        assert entry["outcomes"]["ok"] == entry["outcomes"]["n"] == N
        classes = entry["latency"]["all"]
        parts = sum(classes[kind]["n"] for kind in CLASSES if kind in classes)
        assert parts == classes["all"]["n"] == N
        for repeat in entry["repeats"]:
            assert set(repeat["apc"]["instances"]) == set(INSTANCES)
            assert set(repeat["imbalance"]["tokens"]) == set(INSTANCES)
            assert set(repeat["accumulation"]["sessions"]) == set(INSTANCES)
            overall = repeat["apc"]["overall"]
            assert overall["agrees"] is True
            assert overall["hits"] == overall["cached_tokens"]
            assert overall["apc"] == round(overall["hits"] / overall["queries"], 5)
            assert overall["apc"] == overall["apc_usage"]


def test_a_slower_arm_is_slower_by_what_it_is_slower(document: dict[str, Any]) -> None:
    levels = compared(document, "slow")["percent"]
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        low, high = levels[metric]["p50"]["ci95"]
        assert low < 20 < high
        assert low < levels[metric]["p50"]["value"] < high
        assert high - low < 15


def test_equal_arms_do_not_differ(document: dict[str, Any], text: str) -> None:
    pair = compared(document, "linear_aa")
    assert pair["same"]
    for levels in pair["percent"].values():
        low, high = levels["p50"]["ci95"]
        assert low <= 0 <= high
    assert "| `linear_aa` (A/A) | `linear` |" in text


def test_arms_are_ranked_by_mean_e2e_against_the_best(
    document: dict[str, Any], text: str
) -> None:
    ranks = document["ranking"]
    means = [rank["e2e_ms"] for rank in ranks]
    assert means == sorted(means)
    assert {rank["arm"] for rank in ranks} == {truth.arm for truth in TRUTHS}
    assert (ranks[0]["verdict"], ranks[0]["against_best"]) == ("best", None)
    by_arm = {rank["arm"]: rank for rank in ranks}
    percent = by_arm["slow"]["against_best"]
    low, high = percent["ci95"]
    expected = 100 * (by_arm["slow"]["e2e_ms"] / means[0] - 1)
    assert percent["value"] == pytest.approx(expected, abs=0.01)
    assert low < percent["value"] < high
    # One of two equal arms may be the best: the other is not told from it.
    pair = {by_arm[arm]["verdict"] for arm in ("linear", "linear_aa")}
    assert "higher" not in pair
    table = text.split("## Ranking")[1].split("## ")[0]
    assert table.count("\n| `") == len(TRUTHS)
    head, *_ = re.findall(r"^\| (.+) \|$", table, re.M)
    assert head.split(" | ")[:2] == ["arm", "verdict"]
    assert text.index("## Ranking") < text.index("## Outcomes")


def test_a_ranking_equals_plain_means_over_the_same_requests(tmp_path: Path) -> None:
    truths = Truth("linear", repeats=2), Truth("slow", slower=1.2, repeats=2)
    analysis, _ = analysed(tmp_path, *truths)
    rows = analysis.requests.filter(pl.col("status") == "ok").rows(named=True)
    runs: dict[str, set[tuple[str, int]]] = {}
    for row in rows:
        if row["window"] == "steady":
            runs.setdefault(row["id"], set()).add((row["arm"], row["repeat"]))
    same = {of for of, seen in runs.items() if len(seen) == 4}
    for rank in analysis.results.ranking:
        own = [r["e2e_ms"] for r in rows if r["arm"] == rank.arm and r["id"] in same]
        assert rank.n == len(same)
        assert rank.e2e_ms == pytest.approx(sum(own) / len(own), abs=0.001)


def test_in_virtual_time_repeats_are_orders_and_nothing_has_a_reach(
    tmp_path: Path,
) -> None:
    analysis, _ = analysed(tmp_path, *TRUTHS[:2])
    analysis.results.made.virtual = True
    text = text_of(analysis)
    assert "each an order of the sessions" in text
    assert "reach" not in text


def test_what_is_said_is_about_the_whole_interval() -> None:
    for value, low, high, said in (
        (3, 1, 5, "within the noise floor"),
        (6, 3, 9, "within the noise floor"),
        (-6, -9, -3, "within the noise floor"),
        (6, 4.5, 7, "higher"),
        (-6, -7, -5, "lower"),
        (6, -1, 9, NO_DIFFERENCE),
    ):
        level = Estimate(value, (low, high))
        assert verdict(level, [-4, 4]) == said
        alone = verdict(level, None)
        assert alone.endswith("unknown)") == (low > 0 or high < 0)


def test_a_sound_run_has_no_warnings(document: dict[str, Any]) -> None:
    assert document["warnings"] == []


def test_a_refused_comparison_is_said_first_and_has_no_number(tmp_path: Path) -> None:
    """One arm failed requests that the other did not: no difference may be stated."""
    truths = Truth("linear", repeats=1), Truth("fast", slower=0.5, repeats=1, fails=9)
    analysis, text = analysed(tmp_path, *truths)
    (compared,) = analysis.document["comparisons"]
    assert not analysis.sound
    assert compared["percent"] is None
    first = text.split("## Outcomes")[0]
    assert "**Not compared: `fast` with `linear`**: requests that did not" in first
    assert "**lower" not in first


def test_failure_modes_are_counted_and_ok_of_n_is_said(tmp_path: Path) -> None:
    _, text = analysed(tmp_path, Truth("linear", repeats=1, fails=5))
    n = SESSIONS * TURNS
    assert f"{n - 5}/{n}" in text
    assert "5 requests failed: HTTP 500" in text


def test_a_run_that_failed_is_said_and_its_numbers_are_left_out(
    tmp_path: Path,
) -> None:
    truths = Truth("linear"), Truth("slow", slower=1.2, status="failed")
    analysis, text = analysed(tmp_path, *truths)
    assert not analysis.sound
    assert analysis.document["arms"]["slow"]["latency"] == {}
    assert "an instance ended" in text


def test_a_wrong_belief_is_measured(tmp_path: Path) -> None:
    analysis, _ = analysed(tmp_path, Truth("linear", repeats=1, wrong_belief=1_000))
    believed = analysis.document["arms"]["linear"]["belief"]
    assert believed["too_low"] == 0
    assert believed["too_high"] > 0.5
    assert believed["p99_abs_error_tokens"] == 1_000


def test_the_mirror_is_held_against_the_exact_state_where_there_is_one(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, [Truth("linear", repeats=2)])
    caches = {
        "i0": {
            "mirror_tokens": 100,
            "exact_tokens": 130,
            "mirror_minus_exact_tokens": -30,
            "mean_difference_tokens": 10.0,
            "compared_prompts": 30,
        },
        "i1": {
            "mirror_tokens": 50,
            "exact_tokens": 40,
            "mirror_minus_exact_tokens": 10,
            "mean_difference_tokens": None,
            "compared_prompts": 0,
        },
    }
    instances = {name: {"cache": cache} for name, cache in caches.items()}
    said = json.dumps({"instances": instances, "decision_us": None})
    (run / "linear" / "r0" / "breakdown.json").write_text(said)
    analysis = analyse(read_run(run), MODEL, 100.0)
    with_it, without = analysis.document["arms"]["linear"]["repeats"]
    assert with_it["mirror"] == {
        "prompts": 30,
        "mean_difference_tokens": 10.0,
        "held_difference_tokens": -20,
    }
    assert without["mirror"] is None


def test_every_quantile_of_a_comparison_has_its_verdict(
    document: dict[str, Any], text: str
) -> None:
    slow = compared(document, "slow")
    table = text.split("## Against the baseline")[1].split("## Prefix cache")[0]
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for quantile in ("p50", "p90", "p99"):
            value = slow["percent"][metric][quantile]["value"]
            (cell,) = {
                cell.strip()
                for row in table.splitlines()
                for cell in row.split("|")
                if cell.strip().startswith(f"{value:+.1f} % [")
            }
            verdict = slow["verdicts"][metric][quantile]
            said = "no significant difference" if verdict == NO_DIFFERENCE else verdict
            assert cell.endswith(f"]: {said}")


def test_a_folder_without_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "analyze", str(tmp_path)]) == Exit.BAD_INPUT
    assert str(tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
