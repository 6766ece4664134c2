# SPDX-License-Identifier: Apache-2.0
"""A run directory becomes a report that says what is true, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from synthetic import Truth, page_of, write_run

from lab.records.run import RunRecord
from microbench import report
from microbench.analysis.analysis import analyse
from microbench.analysis.remedies import REMEDIES, Kind
from microbench.analysis.trials import load_run

HASH = "mooncake_both_hash_sync"
TRUTHS = [
    Truth("plain"),
    Truth("plain_aa"),
    Truth("mooncake_both", build_meta=1.2, get_finished=70.0),
    Truth(HASH, slope=85.0, build_meta=2.0, repeat_offsets=(0.0, 40.0)),
    Truth("drifter", drift=20.0, build_meta=1.0),
    Truth("broken", fails="the server died"),
]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"), TRUTHS)
    assert report.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def configs(reported: Path) -> dict[str, Any]:
    return json.loads((reported / "per_config.json").read_text())["configs"]


@pytest.mark.slow
def test_verdicts_tell_growth_from_drift_and_from_failure(configs: dict[str, Any]):
    verdicts = {name: entry["verdict"] for name, entry in configs.items()}
    assert verdicts == {
        "plain": "flat",
        "plain_aa": "flat",
        "mooncake_both": "flat",
        HASH: "grows",
        "drifter": "drifts",
        "broken": "failed",
    }
    assert "the server died" in configs["broken"]["error"]


def test_every_config_has_the_same_fields_in_the_same_order(configs: dict[str, Any]):
    fields = {name: list(entry) for name, entry in configs.items()}
    assert all(names == fields["plain"] for names in fields.values()), fields


def test_what_grew_falls_at_the_reset_by_as_much_and_a_drift_does_not(
    configs: dict[str, Any],
):
    for metric in ("schedule", "step"):
        fall = configs[HASH]["reset_check"][metric]["fall_us_per_1k_blocks"]
        slope = configs[HASH]["slope_us_per_1k_blocks"][metric]["value"]
        assert fall["value"] == pytest.approx(slope, rel=0.1) and fall["ci95"][0] > 0
    drifter = configs["drifter"]["reset_check"]["schedule"]["fall_us_per_1k_blocks"]
    assert (
        drifter["ci95"][1]
        < 0.5 * configs["drifter"]["slope_us_per_1k_blocks"]["schedule"]["value"]
    )


def test_parts_of_a_step_sum_to_the_step(configs: dict[str, Any]):
    for entry in configs.values():
        if entry["attribution_us"] is None:
            continue
        parts = dict(entry["attribution_us"])
        whole = parts.pop("step")
        assert sum(v or 0.0 for v in parts.values()) == pytest.approx(whole, abs=0.01)
        assert whole == pytest.approx(entry["step_us"]["p50"], rel=0.05)


def test_what_was_not_measured_is_null_and_not_zero(configs: dict[str, Any]):
    for method in ("build_meta_us", "get_finished_us", "bind_us"):
        assert configs["plain"][method] is None
        assert configs["mooncake_both"][method]["p50"] > 0


def test_the_same_thing_twice_is_within_noise_and_a_real_cost_is_not(
    configs: dict[str, Any],
):
    again = configs["plain_aa"]["vs_plain"]
    assert again["step"]["within_noise"] and again["schedule"]["within_noise"]
    added = configs["mooncake_both"]["vs_plain"]["step"]
    assert not added["within_noise"]
    assert added["value"] == pytest.approx(70 + 1.2, abs=6)


def test_the_addition_to_tpot_agrees_with_the_measured_one(configs: dict[str, Any]):
    added = configs["mooncake_both"]["tpot_addition"]
    own = added["forward_ms"]["0"]["sync"]["ms"]
    assert own == pytest.approx(added["measured_tpot_p50_ms"], abs=0.01)
    # Async: the hash walk (scheduler side) hides behind a 7 ms forward.
    hidden = configs[HASH]["tpot_addition"]["forward_ms"]["7"]
    assert hidden["async"]["ms"] < 0.1 < 1.0 < hidden["sync"]["ms"]


def test_the_measured_addition_to_tpot_is_stated_at_p90_too(
    reported: Path, configs: dict[str, Any]
):
    before, after = (configs[n]["tpot_plateau_ms"] for n in ("plain", "mooncake_both"))
    added = "/".join(f"{after[q] - before[q]:+.3f}" for q in ("p50", "p90"))
    rows = page_of(reported)["by_title"]["What it adds to TPOT"]["rows"]
    (row,) = (row for row in rows if row[0] == "mooncake_both")
    assert row[-1] == added


def test_every_figure_has_its_data_beside_it(reported: Path):
    figures = sorted((reported / "figures").glob("*.png"))
    assert len(figures) >= 3
    for figure in figures:
        assert pl.read_csv(figure.with_suffix(".csv")).height > 0


def test_the_summary_states_verdict_hypothesis_and_machine(reported: Path):
    text = (reported / "SUMMARY.md").read_text()
    assert f"- `{HASH}`: **grows**: +" in text
    assert "null model" in text and "the server died" in text
    assert "figures/schedule_vs_cache.png" in text
    page = page_of(reported)
    supported = "Supported: growth is a straight line."
    linear = page["by_title"]["hash walk: is its cost linear in |cache|?"]
    assert linear["paragraphs"][0].startswith(supported)
    reference = page["by_title"]["Beside the reference study"]
    assert "+85.6" in [cell for row in reference["rows"] for cell in row]


def test_a_person_reads_the_summary_in_a_few_minutes(
    reported: Path, configs: dict[str, Any]
):
    text = (reported / "SUMMARY.md").read_text()
    (head,) = (line for line in text.splitlines() if line.startswith("| config"))
    assert head.count("|") == 7
    for name, config in configs.items():
        assert text.count(f"- `{name}`: **{config['verdict']}**") == 1
    assert len(text.splitlines()) < 3 * len(configs) + 40


def test_the_page_says_how_each_verdict_was_reached(
    reported: Path, configs: dict[str, Any]
):
    page = page_of(reported)
    told = {one["name"]: one for one in page["sections"][0]["verdicts"]}
    assert set(told) == set(configs)
    for name, config in configs.items():
        assert told[name]["verdict"] == config["verdict"]
        reasons = told[name]["reasons"]
        found = {row[0]: row[1] for row in reasons["rows"]} if reasons else {}
        assert found == config["verdict_of"]


def test_the_page_draws_what_the_figures_csv_hold(reported: Path):
    page = page_of(reported)
    drawn = pl.read_csv(reported / "figures" / "schedule_vs_cache.csv")
    section = page["by_title"]["schedule() time, p50 (µs) against |cache|"]
    for line in section["lines"]:
        curve = drawn.filter(pl.col("config") == line["name"])
        shown = [y for y in line["y"] if y is not None]
        assert shown == curve["p50_us"].to_list()


@pytest.mark.slow
def test_a_curve_that_bends_is_not_called_a_line(tmp_path: Path):
    folder = write_run(tmp_path, [Truth(HASH, slope=1.0, build_meta=1.0)], repeats=3)
    for path in (folder / HASH).glob("r*/engine_step.jsonl"):
        header, *lines = path.read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            extra = 80e-6 * record["cache_size"] ** 2 / 16
            record["schedule_us"] += extra
            record["step_us"] += extra
        path.write_text("\n".join([header, *map(json.dumps, records)]) + "\n")
    assert report.main([str(folder)]) == 0
    (told,) = (
        section["paragraphs"][0]
        for section in page_of(folder)["sections"]
        if "linear" in section["title"]
    )
    assert "not in a straight line: it gets steeper" in told


@pytest.mark.slow
def test_doubts_are_told(tmp_path: Path):
    folder = write_run(
        tmp_path, [Truth("plain"), Truth("noop", build_meta=0.2)], steps=900
    )
    with (folder / "noop" / "r0" / "engine_step.jsonl").open("ab") as file:
        file.write(b'{"step_id":900,"t_')
    path = folder / "noop" / "r1" / "requests.jsonl"
    text = path.read_text()
    text = text.replace('"status":"ok"', '"status":"failed"', 2)
    text = text.replace('"ok":30,"failed":0', '"ok":28,"failed":2')
    path.write_text(text.replace('"valid":true', '"valid":false'))
    assert report.main([str(folder)]) == 0
    shown = " ".join(one["message"] for one in page_of(folder)["warnings"])
    for doubt in ("1 torn last", "2 of 60 requests failed", "sent late"):
        assert doubt in shown, doubt
    summary = (folder / "SUMMARY.md").read_text()
    for warning in page_of(folder)["warnings"]:
        assert f"*{warning['remedy']}.*" in summary
    document = json.loads((folder / "per_config.json").read_text())
    told = [*document["warnings"], *document["configs"]["noop"]["warnings"]]
    assert len(told) >= 4
    for warning in told:
        assert warning.endswith(tuple(REMEDIES.values())), warning


def test_every_doubt_ends_with_what_to_do_about_it():
    assert set(REMEDIES) == set(get_args(Kind))
    for remedy in REMEDIES.values():
        assert remedy[0].isupper() and remedy.endswith(".")


def test_a_failed_repeat_is_named_and_the_others_are_used(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=2, steps=900)
    path = folder / "plain" / "r1" / "trial.json"
    facts = json.loads(path.read_text()) | {"status": "failed", "error": "no port"}
    path.write_text(json.dumps(facts))
    _, trials = load_run(folder)
    entry = analyse(RunRecord(), trials, None).document.configs["plain"]
    assert entry.n_repeats == 1 and entry.error == "r1: no port"
    assert entry.verdict != "failed"


def test_the_page_shows_each_moment_of_a_server_of_every_measured_config(
    reported: Path,
):
    sections = page_of(reported)["sections"]
    lines = {one["title"]: one for one in sections if one["kind"] == "timeline"}
    measured = [truth.name for truth in TRUTHS if truth.fails is None]
    assert list(lines) == [f"Every moment of {name} r0" for name in measured]
    for name in measured:
        line = lines[f"Every moment of {name} r0"]
        records = (reported / name / "r0" / "engine_step.jsonl").read_bytes()
        assert sum(line["steps"]) == records.count(b'"step_us"')
        assert not line["open"]
    walk = lines[f"Every moment of {HASH} r0"]
    assert max(walk["slowest_us"], key=lambda us: us or 0) >= max(
        sum(of) for of in zip(*walk["parts"].values(), strict=True) if None not in of
    )
