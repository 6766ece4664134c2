# SPDX-License-Identifier: Apache-2.0
"""A run directory becomes a report that says what is true, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from synthetic import Truth, trial_steps, write_run

from lab.records.run import RunRecord
from microbench import report
from microbench.analysis.analysis import analyse
from microbench.analysis.levels import Window
from microbench.analysis.remedies import REMEDIES, Kind
from microbench.analysis.steps import LoadedTrial, load_run

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


def test_every_config_has_the_same_fields(configs: dict[str, Any]):
    fields = {name: set(entry) for name, entry in configs.items()}
    assert all(names == fields["plain"] for names in fields.values()), fields


def test_the_reset_confirms_growth_by_what_the_slope_predicts(configs: dict[str, Any]):
    check = configs[HASH]["reset_check"]
    assert check["schedule"]["fell"] and check["step"]["fell"]
    drop, expected = (check["schedule"][k] for k in ("drop_us", "expected_drop_us"))
    assert drop == pytest.approx(expected, rel=0.1)
    assert not configs["drifter"]["reset_check"]["schedule"]["fell"]


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


def test_every_figure_has_its_data_beside_it(reported: Path):
    figures = sorted((reported / "figures").glob("*.png"))
    assert len(figures) >= 3
    for figure in figures:
        assert pl.read_csv(figure.with_suffix(".csv")).height > 0


def test_the_summary_states_verdict_hypothesis_and_machine(reported: Path):
    text = (reported / "SUMMARY.md").read_text()
    assert f"`{HASH}` **grows with |cache|**" in text
    assert "**Supported**: growth is a straight line." in text
    assert "null model" in text and "+85.6" in text and "the server died" in text
    for figure in (reported / "figures").glob("*.png"):
        assert f"figures/{figure.name}" in text


def test_a_curve_that_bends_is_not_called_a_line(tmp_path: Path):
    folder = write_run(tmp_path, [Truth(HASH, slope=1.0, build_meta=1.0)], repeats=1)
    path = folder / HASH / "r0" / "engine_step.jsonl"
    header, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        extra = 80e-6 * record["cache_size"] ** 2 / 16
        record["schedule_us"] += extra
        record["step_us"] += extra
    text = "\n".join([header, *map(json.dumps, records)]) + "\n"
    path.write_text(text)
    assert report.main([str(folder)]) == 0
    assert (
        "not in a straight line**: it gets steeper"
        in (folder / "SUMMARY.md").read_text()
    )


def trial_of(truth: Truth, repeat: int, seed: int, steps: int = 1_600) -> LoadedTrial:
    """A loaded trial without the detour over files, worker times left out."""
    engine, _ = trial_steps(truth, repeat, seed, steps, 16_000)
    count = engine.height
    phase = np.searchsorted([0.6, 0.85], np.arange(count) / count, side="right")
    table = engine.select(
        pl.lit(repeat).alias("repeat"),
        "step_id",
        pl.Series("phase", phase),
        pl.col("scheduled").alias("batch"),
        pl.col("cache_size").alias("cache_blocks"),
        "schedule_us",
        "step_us",
        "update_us",
        (pl.col("schedule_us") + pl.col("update_us")).alias("overhead_us"),
        *(
            pl.lit(None, dtype=pl.Float64).alias(f"{name}_us")
            for name in ("build_meta", "execute_model", "bind", "start_load_kv")
        ),
        *(
            pl.lit(None, dtype=pl.Float64).alias(f"{name}_us")
            for name in ("wait_for_save", "get_finished")
        ),
    )
    return LoadedTrial(truth.name, repeat, None, {}, table)


def slowed(trial: LoadedTrial, start: float, stop: float, factor: float) -> LoadedTrial:
    """The trial on a machine that is `factor` slower for a part of the time."""
    assert trial.steps is not None
    count = trial.steps.height
    place = pl.int_range(count) / count
    times = ("schedule_us", "overhead_us", "step_us")
    steps = trial.steps.with_columns(
        pl.when(place.is_between(start, stop)).then(pl.col(t) * factor).otherwise(t)
        for t in times
    )
    return LoadedTrial(trial.config, trial.repeat, None, None, steps.rename({}))


def verdict_of(trials: list[LoadedTrial]) -> str:
    document = analyse(RunRecord(), trials, None).document
    return document["configs"]["plain"]["verdict"]


def test_a_flat_cost_is_never_called_growing_on_a_noisy_machine():
    rng = np.random.default_rng(0)
    for seed in range(8):
        trials = [trial_of(Truth("plain"), r, 100 * seed + r) for r in range(3)]
        # One neighbour an hour: slow for a random part of each lifetime.
        noisy = []
        for trial in trials:
            start = rng.uniform(0, 0.9)
            stop = start + rng.uniform(0.05, 0.5)
            noisy.append(slowed(trial, start, stop, rng.uniform(1.1, 1.8)))
        assert verdict_of(noisy) != "grows", seed


def test_a_neighbour_that_looks_like_growth_in_one_repeat_does_not_convince():
    trials = [trial_of(Truth("plain"), repeat, repeat) for repeat in range(3)]
    # Slow from the middle of the growth until the reset, then gone.
    trials[1] = slowed(trials[1], 0.3, 0.85, 2.0)
    assert verdict_of(trials) != "grows"


def test_a_machine_that_slows_down_for_good_drifts_and_does_not_grow():
    trials = [
        trial_of(Truth("plain", drift=10.0), repeat, repeat) for repeat in range(2)
    ]
    assert verdict_of(trials) == "drifts"


def test_a_fall_of_less_than_half_the_prediction_does_not_confirm_growth():
    truth = Truth("plain", slope=3.0, drift=6.0)
    trials = [trial_of(truth, repeat, repeat) for repeat in range(2)]
    entry = analyse(RunRecord(), trials, None).document["configs"]["plain"]
    low, _ = entry["reset_check"]["schedule"]["drop_ci95_us"]
    assert low > 0, "no fall at all: a weak test"
    assert entry["verdict"] == "drifts"


def test_steps_after_the_reset_do_not_count_towards_a_level():
    steps = pl.DataFrame({"cache_blocks": [100, 100, 90, 101], "phase": [0, 2, 1, 1]})
    kept = Window(100, {}).select(steps)
    assert kept.rows() == [(100, 0), (101, 1)]


def test_growth_just_above_the_margin_is_still_found():
    trials = [
        trial_of(Truth("plain", slope=4.0), repeat, repeat) for repeat in range(2)
    ]
    assert verdict_of(trials) == "grows"


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
    summary = (folder / "SUMMARY.md").read_text()
    for doubt in ("1 torn last", "2 of 60 requests failed", "sent late", "No A/A pair"):
        assert doubt in summary, doubt
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
    entry = analyse(RunRecord(), trials, None).document["configs"]["plain"]
    assert entry["n_repeats"] == 1 and entry["error"] == "r1: no port"
    assert entry["verdict"] != "failed"


def break_nothing_there(folder: Path) -> str:
    (folder / "run.json").unlink()
    return "run.json: missing"


def break_run_schema(folder: Path) -> str:
    (folder / "run.json").write_text('{"schema": "kvtax.run/9"}')
    return "schema is 'kvtax.run/9', this reader needs 'kvtax.run/1'"


def break_record_schema(folder: Path) -> str:
    path = folder / "plain" / "r0" / "engine_step.jsonl"
    path.write_text(path.read_text().replace("engine_step/1", "engine_step/2", 1))
    return "schema is 'kvtax.engine_step/2'"


def break_engine_file(folder: Path) -> str:
    (folder / "plain" / "r0" / "engine_step.jsonl").unlink()
    return "engine_step.jsonl: missing"


def break_worker_file(folder: Path) -> str:
    (folder / "plain" / "r0" / "worker_step.r0.jsonl").unlink()
    return "no worker_step.r*.jsonl"


def break_requests_file(folder: Path) -> str:
    (folder / "plain" / "r0" / "requests.jsonl").unlink()
    return "requests.jsonl: missing"


def break_by_second_engine(folder: Path) -> str:
    trial = folder / "plain" / "r0"
    text = (trial / "engine_step.jsonl").read_text()
    (trial / "engine_step.1.jsonl").write_text(text)
    return "2 engine step files"


def break_by_old_patch(folder: Path) -> str:
    path = folder / "plain" / "r0" / "engine_step.jsonl"
    path.write_text(path.read_text().replace("cache_size", "other_size"))
    return "add the patch step_timing_v2"


def break_plan(folder: Path) -> str:
    (folder / "run.json").write_text('{"schema": "kvtax.run/1", "plan": []}')
    return "the plan is empty"


@pytest.mark.parametrize(
    "damage",
    [value for name, value in sorted(globals().items()) if name.startswith("break_")],
)
def test_bad_input_is_a_clear_message_and_exit_1(
    damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=300)
    message = damage(folder)
    assert report.main([str(folder)]) == 1
    assert message in capsys.readouterr().err
    assert not (folder / "SUMMARY.md").exists()
