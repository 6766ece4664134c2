# SPDX-License-Identifier: Apache-2.0
"""A run becomes a report that says what is true, and no more, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from kvtax.cli import main
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import read_document, write_document
from kvtax.records.per_config import Evidence
from kvtax.records.requests import Phase
from kvtax.records.warning import Warn
from kvtax.report.markdown import DASH
from kvtax.stats.processes import RunSpread
from kvtax.verdict.analysis import analyse
from kvtax.verdict.metrics import TPOT
from kvtax.verdict.trials import load_run
from microbench.summary.figures import BINS, binned_curves
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


@pytest.mark.slow
def test_every_config_has_the_same_fields_in_the_same_order(configs: dict[str, Any]):
    fields = {name: list(entry) for name, entry in configs.items()}
    assert all(names == fields["plain"] for names in fields.values()), fields


def test_what_grew_rises_with_the_level_and_a_drift_from_pass_to_pass(
    configs: dict[str, Any],
):
    for metric in ("schedule", "step"):
        held = configs[HASH]["held"][metric]
        slope = configs[HASH]["slope_us_per_1k_blocks"][metric]
        # The slowest tenth is cut off, of which a larger level has as large a share.
        assert slope["value"] == pytest.approx(85.0, rel=0.01)
        rises = np.diff(held["us"]) / np.diff(held["cache_blocks"]) * 1_000
        assert rises == pytest.approx(85.0, rel=0.1)
        assert (held["shape"], abs(held["drift_us_per_pass"]) < 10) == ("linear", True)
    drifter = configs["drifter"]
    low, high = drifter["slope_us_per_1k_blocks"]["schedule"]["ci95"]
    assert low < 0 < high
    # 40 us per 1,000 of 16,000 blocks over the trial, 0.13 of which is a pass.
    assert drifter["held"]["schedule"]["drift_us_per_pass"] == pytest.approx(
        83, rel=0.1
    )


def test_the_slope_while_the_cache_fills_is_stated_beside_that_of_the_levels(
    configs: dict[str, Any],
):
    growth = configs[HASH]["growth_slope_us_per_1k_blocks"]
    assert growth["value"] == pytest.approx(85.0, rel=0.03)


def test_levels_are_stated_at_the_highest_below_a_full_cache(report: Report):
    window = report.document["window"]
    assert window["at_cache_blocks"] == pytest.approx(0.925 * 16_000, rel=0.01)
    for entry in report.document["configs"].values():
        if entry["schedule_us"]:
            assert entry["schedule_us"]["at_cache_blocks"] == window["at_cache_blocks"]
            level = entry["held"]["schedule"]["us"][3]
            assert entry["schedule_us"]["p50"] == pytest.approx(level, rel=0.1)


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
    report: Report, configs: dict[str, Any]
):
    before, after = (configs[n]["tpot_plateau_ms"] for n in ("plain", "mooncake_both"))
    added = "/".join(f"{after[q] - before[q]:+.3f}" for q in ("p50", "p90"))
    rows = report.page["by_title"]["What it adds to TPOT"]["rows"]
    (row,) = (row for row in rows if row[0] == "mooncake_both")
    assert row[-1] == added


def test_every_figure_has_its_data_beside_it(report: Report):
    figures = sorted((report.folder / "figures").glob("*.png"))
    assert [one.stem for one in figures] == [
        "held_levels",
        "held_passes",
        "schedule_vs_cache",
    ]
    for figure in figures:
        assert pl.read_csv(figure.with_suffix(".csv")).height > 0


def test_the_summary_states_verdict_hypothesis_and_machine(report: Report):
    text = report.summary
    (grows,) = (line for line in text.splitlines() if "(linear)" in line)
    assert grows.startswith(f"| `{HASH}` | +1,3") and "timed, " in grows
    assert "null model" in text and "the server died" in text
    assert "figures/schedule_vs_cache.png" in text
    page = report.page
    supported = "Supported: its levels are consistent with a straight line."
    linear = page["by_title"]["H5: is the cost of hash walk linear in |cache|?"]
    assert linear["paragraphs"][0].startswith(supported)
    study = page["by_title"]["H5: cost per step"]
    assert "+85.6" in [cell for row in study["rows"] for cell in row]
    assert f"| `{HASH}` | grows | +1,3" in text and "+85.6" in text


def test_what_a_server_takes_at_rest_is_beside_its_levels(
    report: Report, configs: dict[str, Any]
):
    repeats = configs[HASH]["n_repeats"]
    assert configs[HASH]["pss_mib"] == 1_000 + (repeats - 1) / 2
    assert "| 2.5, 0.0; 1,000.5 |" in report.summary


SHORT = {"flat": "at most ", "drifts": "grows with time", "inconclusive": "not known"}


def test_a_person_reads_the_summary_in_a_few_minutes(
    report: Report, configs: dict[str, Any]
):
    text = report.summary
    heads = [line for line in text.splitlines() if line.startswith("| config")]
    assert [head.count("|") for head in heads] == [10, 9]
    first, _, verdicts = text.partition("## Verdicts\n\n")
    stated = verdicts.partition("\n| config")[0]
    for name, config in configs.items():
        short = SHORT.get(config["verdict"], config["verdict"])
        assert f"| `{name}` | {short}" in first
        failed = f"- `{name}`: **failed**: "
        assert (failed if short == "failed" else f"| `{name}` | ") in stated
    assert len(text.splitlines()) < 4 * len(configs) + 48


def test_the_page_says_how_each_verdict_was_reached(
    report: Report, configs: dict[str, Any]
):
    page = report.page
    section = page["by_title"]["Does the cost grow with |cache|?"]
    told = {one["name"]: one for one in section["verdicts"]}
    assert set(told) == set(configs)
    for name, config in configs.items():
        assert told[name]["verdict"] == config["verdict"]
        reasons = told[name]["reasons"]
        rows = {row[0]: row[1:] for row in reasons["rows"]} if reasons else {}
        found = {metric: row[0].partition(",")[0] for metric, row in rows.items()}
        judged = {m: of for m, of in config["verdict_of"].items() if m != "rare"}
        assert found == (judged if config["held"] else {})
        for metric, held in config["held"].items():
            assert len([cell for cell in rows[metric][5:] if cell != DASH]) == len(
                held["us"]
            )
            assert rows[metric][2] == f"{held['most_us']:,.1f}"
    shape = told[HASH]["reasons"]["rows"][0][1]
    assert shape == "grows, linear"


def test_the_page_draws_what_the_figures_csv_hold(report: Report):
    drawn = pl.read_csv(report.folder / "figures" / "schedule_vs_cache.csv")
    section = report.page["by_title"]["schedule() time, p50 (µs) against |cache|"]
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
    (told,) = (
        section["paragraphs"][0]
        for section in report_of(folder).page["sections"]
        if "linear" in section["title"]
    )
    assert "It grows, but not in a straight line: curved." in told


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
    shown = " ".join(one["message"] for one in report.page["warnings"])
    for doubt in ("1 torn last", f"2 of {2 * count} requests failed", "sent late"):
        assert doubt in shown, doubt
    for warning in report.page["warnings"]:
        assert f"**What to do:** {warning['remedy']}" in report.summary
    document = report.document
    told = [*document["warnings"], *document["configs"]["noop"]["warnings"]]
    assert len(told) >= 4
    for warning in told:
        assert warning.endswith(tuple(warn.value[1] for warn in Warn)), warning


def test_every_kind_of_warning_has_a_text_and_says_what_to_do_about_it():
    # Two kinds with the same text and remedy would be one.
    assert len(Warn) == len(Warn.__members__)
    for text, remedy in (warn.value for warn in Warn):
        assert text and not text.endswith(".")
        assert remedy[0].isupper() or remedy.startswith("{what}")


def test_a_failed_repeat_is_named_and_the_others_are_used(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=2, steps=900)
    path = folder / "plain" / "r1" / "trial.json"
    facts = json.loads(path.read_text()) | {"status": "failed", "error": "no port"}
    path.write_text(json.dumps(facts))
    run, trials = load_run(folder)
    entry = analyse(run, trials, None).document.configs["plain"]
    assert entry.n_repeats == 1 and entry.error == "r1: no port"
    assert entry.verdict != "failed"


def test_the_page_shows_each_moment_of_a_server_of_every_measured_config(
    report: Report,
):
    sections = report.page["sections"]
    lines = {one["title"]: one for one in sections if one["kind"] == "timeline"}
    measured = [truth.name for truth in TRUTHS if truth.fails is None]
    assert list(lines) == [f"Every moment of {name} r0" for name in measured]
    for name in measured:
        line = lines[f"Every moment of {name} r0"]
        records = (report.folder / name / "r0" / "engine_step.jsonl").read_bytes()
        assert sum(line["steps"]) == records.count(b'"step_us"')
        assert not line["open"]
    walk = lines[f"Every moment of {HASH} r0"]
    assert max(walk["slowest_us"], key=lambda us: us or 0) >= max(
        sum(of) for of in zip(*walk["parts"].values(), strict=True) if None not in of
    )


STEPS, BLOCKS = 3_000, 15_000


def growth(repeat: int, slope: float) -> pl.DataFrame:
    """A growth phase whose batch size, 7 us each, rises with |cache|."""
    blocks = np.linspace(0, BLOCKS, STEPS)
    jitter = np.arange(STEPS) % 3
    batch = (2 + blocks / 5_000 + jitter).astype(int)
    us = 100 + 7.0 * batch + 30.0 * repeat
    return pl.DataFrame(
        {
            "repeat": repeat,
            "phase": Phase.GROWTH,
            "batch": batch,
            "cache_blocks": blocks.astype(int),
            "schedule_us": us + slope * blocks / 1_000,
            "build_meta_us": us,
        }
    )


@pytest.fixture
def measured():
    steps = pl.concat([growth(repeat, slope=20.0) for repeat in range(2)])
    return {"one": SimpleNamespace(decodes=steps)}


def test_a_curve_rises_by_the_slope_of_its_own_time(measured):
    for time, slope in (("schedule_us", 20.0), ("build_meta_us", 0.0)):
        curve = binned_curves(measured, time)
        assert curve.height == BINS
        fit = np.polyfit(curve["cache_blocks"], curve["p50_us"], 1)
        assert fit[0] * 1_000 == pytest.approx(slope, abs=0.1)


def test_the_band_holds_neither_repeats_nor_batch_sizes(measured):
    curve = binned_curves(measured, "build_meta_us")
    assert (curve["p75_us"] - curve["p25_us"]).max() < 0.01


def test_a_time_that_no_config_measured_has_no_curve(measured):
    steps = measured["one"].decodes.with_columns(build_meta_us=pl.lit(None, pl.Float64))
    assert binned_curves(
        {"one": SimpleNamespace(decodes=steps)}, "build_meta_us"
    ).is_empty()


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
    figures = {one.stem for one in (report.folder / "figures").glob("*.csv")}
    assert figures == {"held_levels", "held_passes"}
    assert report.document["configs"]["plain"]["verdict"] == "flat"


RESULTS = ("per_config.json", "SUMMARY.md")


def made_again(evidence: Path, out: Path) -> list[bytes]:
    """What `kvtax sweep --report` makes of a file of evidence."""
    assert main(["sweep", "--report", str(evidence), "--out", str(out)]) == 0
    return [(out / name).read_bytes() for name in RESULTS]


@pytest.mark.slow
def test_results_of_a_run_are_made_again_from_its_evidence_byte_for_byte(tmp_path):
    truths = [Truth("plain"), Truth("mooncake_both_hash_sync", 60.0, build_meta=2.0)]
    truths += [Truth("noop", fails="it died"), Truth("plain_aa")]
    folder = write_run(tmp_path / "run", truths)
    assert main(["sweep", "--report", str(folder)]) == 0
    first = [(folder / name).read_bytes() for name in RESULTS]
    assert made_again(folder / "evidence.json.gz", tmp_path / "again") == first
    (folder / "SUMMARY.md").unlink()
    assert main(["sweep", "--report", str(folder / "evidence.json.gz")]) == 0
    assert [(folder / name).read_bytes() for name in RESULTS] == first


@pytest.mark.slow
def test_tpot_of_holds_stands_beside_that_of_the_baseline_where_it_is_known(tmp_path):
    folder = write_run(tmp_path / "run", [Truth("plain"), Truth("mooncake_both")])
    assert main(["sweep", "--report", str(folder)]) == 0
    assert "TPOT held" not in (folder / "SUMMARY.md").read_text()
    evidence = read_document(folder / "evidence.json.gz", Evidence)
    for name, us in (("plain", [4_000, 4_100]), ("mooncake_both", [5_000, 5_100])):
        evidence.configs[name].log_p50[TPOT] = np.log(us).tolist()
    write_document(tmp_path / "evidence.json", evidence)
    _, summary = made_again(tmp_path / "evidence.json", tmp_path / "again")
    rows = [row for row in summary.decode().splitlines() if row.startswith("| `")]
    assert rows[0].endswith("| 4.05 |")
    (row,) = [row for row in rows if "| 5.05 (+1.00 [+0." in row]
    assert row.startswith("| `mooncake_both` |")


@pytest.mark.slow
@pytest.mark.skipif(
    not (REPOSITORY / "evidence.json.gz").exists(), reason="no sweep is committed"
)
def test_the_committed_sweep_is_made_again_from_its_evidence(tmp_path):
    committed = [(REPOSITORY / name).read_bytes() for name in RESULTS]
    assert made_again(REPOSITORY / "evidence.json.gz", tmp_path) == committed


@pytest.mark.parametrize(
    ("value", "ci95", "held"),
    [(5.0, (4.0, 6.0), True), (3.9, (4.0, 6.0), False), (5.0, None, True)],
)
def test_a_headline_holds_another_days_figure_or_not(value, ci95, held):
    assert occasions.holds(Estimate(5.0, (4.0, 6.0)), Estimate(value, ci95)) is held
    assert occasions.holds(Estimate(5.0, None), Estimate(value, ci95)) is None


@pytest.mark.parametrize(
    ("value", "servers", "is_near"),
    [(100.0, 1, True), (130.0, 1, True), (130.0, 9, False), (40.0, 1, False)],
)
def test_figures_of_two_occasions_may_differ_as_servers_do(value, servers, is_near):
    """Servers differ by 10 %: two of them by up to 32 %, means of nine by 11 %."""
    spread = RunSpread(0.1, 10)
    one, other = Estimate(100.0), Estimate(value)
    assert occasions.near(spread, one, other, servers) is is_near
    assert occasions.near(None, one, other, servers) is None
    assert occasions.near(spread, one, Estimate(-1.0), servers) is None


@pytest.mark.slow
def test_sweeps_of_two_occasions_are_compared_by_the_walk(tmp_path):
    walk = Truth("mooncake_both_hash_sync", 60.0, build_meta=2.0)
    sweeps = []
    for number in range(2):
        folder = write_run(tmp_path / str(number), [Truth("plain"), walk])
        assert main(["sweep", "--report", str(folder)]) == 0
        evidence = read_document(folder / "evidence.json.gz", Evidence)
        sweeps.append(occasions.occasion(evidence))
    first, _ = sweeps
    assert first.adds["µs"].value == pytest.approx(60 * 16, rel=0.05)
    # The made-up servers timed no yardstick.
    assert first.adds["yardsticks"] is None
    said = occasions.report(sweeps)
    assert "of a full cache in µs in 2 (2) of 2, in yardsticks in 0 (0) of 0;" in said
