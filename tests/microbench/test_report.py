# SPDX-License-Identifier: Apache-2.0
"""A run becomes a report that says what is true, and no more, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from kvtax.cli import main
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.warning import Warn
from kvtax.verdict.analysis import analyse
from kvtax.verdict.changes import are_comparable
from kvtax.verdict.trials import load_run
from tests.microbench.synthetic import Report, Truth, report_of, write_run
from tools import occasions

HASH = "mooncake_both_hash_sync"
TRUTHS = [
    Truth("plain"),
    Truth("plain_aa"),
    Truth("mooncake_both", build_meta=1.2, get_finished=70.0),
    Truth(HASH, slope=85.0, build_meta=2.0, repeat_offsets=(0.0, 40.0)),
    Truth("drifter", drift=40.0, build_meta=1.0),
    Truth("broken", fails="the server died"),
]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Draw pictures of the shared report alone: they take longer than all the rest."""
    monkeypatch.setattr("kvtax.report.png.draw", lambda *_: None)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(write_run(tmp_path_factory.mktemp("run"), TRUTHS))


@pytest.fixture(scope="module")
def configs(report: Report) -> dict[str, Any]:
    return report.document["configs"]


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
    fields = {name: list(entry) for name, entry in configs.items()}
    assert all(names == fields["plain"] for names in fields.values()), fields


@pytest.mark.slow
def test_what_grew_rises_with_the_level_and_a_drift_from_pass_to_pass(
    configs: dict[str, Any],
):
    walk = configs[HASH]
    held = walk["held"]["timed"]
    us = np.array(held["levels"]) * held["unit"]
    rises = np.diff(us) / np.diff(held["cache_blocks"]) * 1_000
    assert rises == pytest.approx(85.0, rel=0.1)
    assert held["shape"] == "linear"
    assert walk["slope_us_per_1k_blocks"]["schedule"] == {
        "value": pytest.approx(85.0, rel=0.02),
        "ci95": None,
    }
    growth = walk["growth_slope_us_per_1k_blocks"]
    assert growth["value"] == pytest.approx(85.0, rel=0.03)
    drifter = configs["drifter"]["held"]["timed"]
    # 40 us per 1,000 of 16,000 blocks over the trial, 0.13 of which is a pass.
    drift_us = drifter["drift_per_pass"] * drifter["unit"]
    assert drift_us == pytest.approx(83, rel=0.1)


@pytest.mark.slow
def test_a_cost_is_stated_over_the_baseline_in_own_work(configs: dict[str, Any]):
    # get_finished takes 70 us of some 620 that the rest of a step takes.
    over = configs["mooncake_both"]["over_baseline"]
    assert over["us"] == pytest.approx(71, rel=0.15)
    low, high = over["percent"]["ci95"]
    assert low < 100 * 71 / 620 < high
    assert configs["plain"]["over_baseline"] is None
    low, high = configs["plain_aa"]["over_baseline"]["percent"]["ci95"]
    assert low < 0 < high


@pytest.mark.slow
def test_costs_are_stated_at_the_highest_level_below_a_full_cache(report: Report):
    window = report.document["window"]
    assert window["at_cache_blocks"] == pytest.approx(0.925 * 16_000, rel=0.01)
    assert report.document["baseline"] == "plain"
    assert report.document["configs"]["broken"]["schedule_us"] is None


@pytest.mark.slow
def test_parts_of_a_step_sum_to_the_step(configs: dict[str, Any]):
    for entry in configs.values():
        if entry["attribution_us"] is None:
            continue
        parts = dict(entry["attribution_us"])
        whole = parts.pop("step")
        assert sum(v or 0.0 for v in parts.values()) == pytest.approx(whole, abs=0.01)
        assert whole == pytest.approx(entry["step_us"]["p50"], rel=0.05)


@pytest.mark.slow
def test_what_was_not_measured_is_null_and_not_zero(configs: dict[str, Any]):
    for method in ("build_meta_us", "get_finished_us"):
        assert configs["plain"][method] is None
        assert configs["mooncake_both"][method]["p50"] > 0
    assert configs["plain"]["tpot_full_adds"] is None


@pytest.mark.slow
def test_every_figure_has_its_data_beside_it(report: Report):
    figures = report.folder / "figures"
    names = {"held_levels", "held_passes", "schedule_vs_cache"}
    assert {file.stem for file in figures.glob("*.csv")} == names
    levels = pl.read_csv(figures / "held_levels.csv")
    walk = levels.filter(config=HASH)
    assert walk["percent"].is_sorted() and walk.height == 5
    passes = pl.read_csv(figures / "held_passes.csv")
    assert set(passes["config"]) == {HASH}
    growth = pl.read_csv(figures / "schedule_vs_cache.csv").filter(config=HASH)
    rise_us = growth["p50_us"][-1] - growth["p50_us"][0]
    assert rise_us == pytest.approx(85 * 15.5 + 3 * 4, rel=0.1)


@pytest.mark.slow
def test_a_person_reads_the_summary_in_a_minute(report: Report):
    lines = report.summary.splitlines()
    assert len(lines) <= 75  # with the warnings of a failed config
    rows = [line for line in lines if line.startswith(f"| `{HASH}` | **grows**")]
    figures = pl.Series([rows[0]]).str.extract_all(r"-?[\d,.]*\d").explode()
    assert len(figures) <= 12
    assert "1 grows with |cache| (mooncake_both_hash_sync)" in report.summary
    assert "1 failed (broken)" in report.summary
    assert "Costs are shares of vLLM's own work" in report.summary
    table = report.page["by_title"]["Cost per engine step"]
    assert table["rows"][0][0] == HASH
    for row in table["rows"]:
        assert f"| `{row[0]}` | {' | '.join(row[1:])} |" in report.summary


@pytest.mark.slow
def test_the_page_begins_with_the_picture_and_each_verdict_opens_its_holds(
    report: Report,
):
    kinds = [section["kind"] for section in report.page["sections"]]
    assert kinds[:2] == ["figure", "table"]
    verdicts = report.page["by_title"]["Verdicts and their holds"]["verdicts"]
    assert verdicts[0]["name"] == HASH
    reasons = verdicts[0]["reasons"]
    assert reasons["columns"][-3:] == ["a full cache adds", "at most", "shape"]
    assert len([name for name in reasons["columns"] if " blocks" in name]) == 5
    assert {row[0] for row in reasons["rows"]} >= {"scheduler and connector"}
    (figure, *_) = report.page["sections"]
    lines = {line["name"]: line for line in figure["lines"]}
    assert lines["plain"]["muted"] and not lines[HASH]["muted"]


@pytest.mark.slow
def test_the_studys_figures_stand_beside_ours(report: Report):
    table = report.page["by_title"]["The reference study's figures"]
    rows = {(row[0], row[1]): row[2:] for row in table["rows"]}
    ours, study, word = rows[HASH, "growth, µs per 1,000 blocks"]
    assert (study, word) == ("85.6", "agrees") and float(ours) == pytest.approx(
        85, 0.03
    )
    # 70 us of get_finished are not the study's 180.
    assert rows[HASH, "get_finished p50, µs"][-1] == "differs"


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
    count = text.count('"type":"request"')
    text = text.replace(f'"ok":{count},"failed":0', f'"ok":{count - 2},"failed":2')
    path.write_text(text.replace('"valid":true', '"valid":false'))
    report = report_of(folder)
    shown = " ".join(warning["message"] for warning in report.page["warnings"])
    for doubt in ("1 torn last", f"2 of {2 * count} requests failed", "sent late"):
        assert doubt in shown, doubt
    for warning in report.page["warnings"]:
        assert f"**What to do:** {warning['remedy']}" in report.summary
    document = report.document
    texts = [*document["warnings"], *document["configs"]["noop"]["warnings"]]
    assert len(texts) >= 4
    for warning in texts:
        assert warning.endswith(tuple(warn.value[1] for warn in Warn)), warning


def test_every_kind_of_warning_has_a_text_and_says_what_to_do_about_it():
    # Two kinds with the same text and remedy would be one.
    assert len(Warn) == len(Warn.__members__)
    for text, remedy in (warn.value for warn in Warn):
        assert text and not text.endswith(".")
        assert remedy[0].isupper() or remedy.startswith("{what}")


@pytest.mark.slow
def test_a_failed_repeat_is_named_and_the_others_are_used(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=2, steps=900)
    path = folder / "plain" / "r1" / "trial.json"
    facts = json.loads(path.read_text()) | {"status": "failed", "error": "no port"}
    path.write_text(json.dumps(facts))
    run, trials = load_run(folder)
    entry = analyse(run, trials, None).document.configs["plain"]
    assert entry.n_repeats == 1 and entry.error == "r1: no port"
    assert entry.verdict != "failed"


STEPS_FILE = "plain/r0/engine_step.jsonl"
NOT_READ = {
    "nothing there": (lambda run: (run / "run.json").unlink(), "run.json: missing"),
    "another schema": (
        lambda run: (run / "run.json").write_text('{"schema": "kvtax.run/9"}'),
        "schema is 'kvtax.run/9', this reader needs 'kvtax.run/1'",
    ),
    "unknown role": (
        lambda run: change_run(
            run, lambda of: of.update(configs={"plain": {"role": "referee"}})
        ),
        "'referee' - at `$.configs",
    ),
    "no plan": (
        lambda run: change_run(run, lambda of: of.update(plan=[])),
        "the plan is empty",
    ),
    "no levels": (
        lambda run: change_run(run, lambda of: of["profile"]["load"].pop("ladder")),
        "missing required field `ladder`",
    ),
    "another schema of steps": (
        lambda run: rewrite(run / STEPS_FILE, "engine_step/1", "engine_step/2"),
        "schema is 'kvtax.engine_step/2'",
    ),
    "no engine": (
        lambda run: (run / STEPS_FILE).unlink(),
        "engine_step.jsonl: missing",
    ),
    "no worker": (
        lambda run: (run / "plain/r0/worker_step.r0.jsonl").unlink(),
        "no worker_step.r*.jsonl",
    ),
    "no requests": (
        lambda run: (run / "plain/r0/requests.jsonl").unlink(),
        "requests.jsonl: missing",
    ),
    "a second engine": (
        lambda run: copy_into(run / STEPS_FILE, run / "plain/r0/another life"),
        "2 engine lives",
    ),
    "a foreign scheduler": (
        lambda run: rewrite(run / STEPS_FILE, "cache_size", "other_size"),
        "the scheduler has no block pool of vLLM's",
    ),
}


def change_run(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    run = json.loads((folder / "run.json").read_text())
    change(run)
    (folder / "run.json").write_text(json.dumps(run))


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def copy_into(path: Path, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(path, folder)


@pytest.mark.parametrize("damage", NOT_READ)
def test_a_run_that_cannot_be_read_is_bad_input(
    damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=300)
    spoil, message = NOT_READ[damage]
    spoil(folder)
    assert main(["sweep", "--report", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "SUMMARY.md").exists()


@pytest.mark.slow
def test_a_run_whose_requests_were_all_late_has_levels_and_no_growth(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain"), Truth("noop", build_meta=0.2)])
    for path in folder.rglob("requests.jsonl"):
        path.write_text(path.read_text().replace('"valid":true', '"valid":false'))
    report = report_of(folder)
    figures = {file.stem for file in (report.folder / "figures").glob("*.csv")}
    assert figures == {"held_levels", "held_passes"}
    assert report.document["configs"]["plain"]["verdict"] == "flat"


RESULTS = ("per_config.json", "SUMMARY.md", "report.html")


def made_again(evidence: Path, out: Path) -> list[bytes]:
    """Return what `kvtax sweep --report` makes of a file of evidence."""
    assert main(["sweep", "--report", str(evidence), "--out", str(out)]) == 0
    return results_in(out)


def results_in(folder: Path) -> list[bytes]:
    figures = sorted((folder / "figures").glob("*.csv"))
    return [file.read_bytes() for file in (*map(folder.joinpath, RESULTS), *figures)]


@pytest.mark.slow
def test_results_of_a_run_are_made_again_from_its_evidence_byte_for_byte(tmp_path):
    truths = [Truth("plain"), Truth("mooncake_both_hash_sync", 60.0, build_meta=2.0)]
    truths += [Truth("noop", fails="it died"), Truth("plain_aa")]
    folder = write_run(tmp_path / "run", truths)
    assert main(["sweep", "--report", str(folder)]) == 0
    first = results_in(folder)
    assert len(first) == 6
    assert made_again(folder / "evidence.json.gz", tmp_path / "again") == first
    (folder / "SUMMARY.md").unlink()
    assert main(["sweep", "--report", str(folder / "evidence.json.gz")]) == 0
    assert results_in(folder) == first


@pytest.mark.slow
@pytest.mark.skipif(
    not (REPOSITORY / "evidence.json.gz").exists(), reason="no sweep is committed"
)
def test_the_committed_sweep_is_made_again_from_its_evidence(tmp_path):
    document, summary, *_ = made_again(REPOSITORY / "evidence.json.gz", tmp_path)
    assert document == (REPOSITORY / "per_config.json").read_bytes()
    assert summary == (REPOSITORY / "SUMMARY.md").read_bytes()


@pytest.mark.parametrize(("value", "agrees"), [(5.0, True), (6.4, True), (6.5, False)])
def test_figures_of_two_days_agree_within_both_intervals(value, agrees):
    """Two intervals of 1 to both sides reach 1.41 together."""
    estimate, other_estimate = (Estimate(of, (of - 1, of + 1)) for of in (5.0, value))
    assert occasions.near(estimate, other_estimate) is agrees


@pytest.mark.slow
def test_statements_of_the_committed_sweeps_agree():
    sweeps = occasions.committed()
    text = occasions.report(sweeps)
    agree, of = map(int, text.partition("agree in ")[2].split()[:3:2])
    assert agree >= 0.95 * of and of >= 100
    assert "calls 0 costs changed" in text
    adds = [
        next(e for e in of.configs.values() if e.verdict == "grows").full_adds.percent
        for of in sweeps
        if are_comparable(sweeps[0], of)
    ]
    assert len(adds) >= 4
    values = [estimate.value for estimate in adds]
    # Microseconds differ by a factor of 2.8.
    assert max(values) < 1.1 * min(values)
