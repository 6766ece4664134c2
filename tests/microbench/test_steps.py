# SPDX-License-Identifier: Apache-2.0
"""Step files become the table of decode-only steps, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from kvtax.records import RecordsError
from kvtax.records.requests import Phase, PhaseStart
from kvtax.steps.step_table import overhead_us, read_worker_steps
from kvtax.steps.trial_steps import read_engine_steps
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run, load_trial
from tests.microbench.synthetic import FIRST_NS, STEP_NS, Truth, write_run

HEADER = {"schema": "kvtax.engine_step/1", "clock": "CLOCK_MONOTONIC"}


def engine_record(step_id: int, **changes) -> dict:
    record = {
        "step_id": step_id,
        "t_ns": FIRST_NS + step_id * STEP_NS,
        "schedule_us": 50.0 + step_id,
        "step_us": 250.0,
        "scheduled": 4,
        "prefill_tokens": 0,
        "decode_tokens": 4,
        "cache_size": 100 + step_id,
        "update_us": 30.0,
    }
    return record | changes


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_only_decode_only_steps_of_a_phase_are_kept(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=800)
    trial = folder / "plain" / "r0"
    path = trial / "engine_step.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["t_ns"] = FIRST_NS - 1  # an engine-start dummy step
    lines[1]["prefill_tokens"] = 0
    lines[2] |= {"prefill_tokens": 0, "decode_tokens": 0, "scheduled": 0}
    write_lines(path, lines)
    steps = load_trial(folder, "plain", 0).steps.filter("decode_only")
    wanted = [
        line["step_id"]
        for line in lines[2:]
        if line["prefill_tokens"] == 0 and line["decode_tokens"] > 0
    ]
    assert steps is not None and steps["step_id"].to_list() == wanted
    assert steps["phase"].unique().sort().to_list() == [0, 1, 3]


def test_a_pass_begins_at_its_reset_and_not_at_the_phase_record(tmp_path: Path):
    lines = [HEADER] + [engine_record(step) for step in range(10)]
    write_lines(tmp_path / "engine_step.jsonl", lines)
    phases = [
        PhaseStart("growth", FIRST_NS),
        PhaseStart("hold.0.0", FIRST_NS, reset_ns=FIRST_NS + 6 * STEP_NS),
    ]
    engine = read_engine_steps(tmp_path, phases).frame
    assert engine["phase"].to_list() == [0] * 6 + [3] * 4


def test_a_step_has_the_pass_and_the_level_that_it_was_held_at(tmp_path: Path):
    lines = [HEADER] + [engine_record(step) for step in range(12)]
    write_lines(tmp_path / "engine_step.jsonl", lines)
    names = ["growth", "fill.0.0.decoders", "hold.0.0", "fill.0.1", "hold.0.1"]
    names += ["fill.1.0.decoders"]
    phases = []
    for number, name in enumerate(names):
        start_ns = FIRST_NS + 2 * number * STEP_NS
        reset_ns = start_ns if name.endswith("0.decoders") else None
        phases.append(PhaseStart(name, start_ns, reset_ns))
    engine = read_engine_steps(tmp_path, phases).frame
    fill, hold = int(Phase.FILL), int(Phase.HOLD)
    assert engine["phase"].to_list()[::2] == [0, fill, hold, fill, hold, fill]
    assert engine["cycle"].to_list()[::2] == [0, 1, 1, 1, 1, 2]
    assert engine["level"].to_list()[::2] == [0, 0, 0, 1, 1, 0]


def test_steps_join_by_id_even_out_of_order_and_missing_ones_are_counted(
    tmp_path: Path,
):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=800)
    trial = folder / "plain" / "r0"
    for name in ("engine_step.jsonl", "worker_step.r0.jsonl"):
        header, *rest = (trial / name).read_text().splitlines(keepends=True)
        rest[10], rest[11] = rest[11], rest[10]
        if name.startswith("worker"):
            del rest[100:103]
        (trial / name).write_text(header + "".join(rest))
    loaded = load_trial(folder, "plain", 0)
    worker = pl.read_ndjson(
        (trial / "worker_step.r0.jsonl").read_bytes().split(b"\n", 1)[1]
    )
    assert loaded.steps is not None
    both = loaded.steps.join(worker, on="step_id", how="left")
    missing = both["execute_model_us_right"].null_count()
    assert loaded.engine_without_worker == missing > 0
    off = (both["execute_model_us"] - both["execute_model_us_right"]).abs().max()
    assert off < 1e-3


def test_of_several_ranks_the_slowest_counts_in_each_step(tmp_path: Path):
    """Whole: its parts add up to its step, which the maxima of all ranks would not."""
    header = {"schema": "kvtax.worker_step/1"}
    # By rank, execute_model_us and get_finished_us of two steps; None: not measured.
    ranks = [[(100.0, 9.0), (130.0, 1.0)], [(120.0, 3.0), (110.0, 7.0)], [(None, 50.0)]]
    for rank, times in enumerate(ranks):
        records = []
        for step_id, (execute, finished) in enumerate(times):
            record = {"step_id": step_id, "t_ns": 1, "get_finished_us": finished}
            record |= {} if execute is None else {"execute_model_us": execute}
            records.append(record)
        write_lines(tmp_path / f"worker_step.r{rank}.jsonl", [header, *records])
    found = read_worker_steps(tmp_path)
    assert found.records == 5
    rows = found.frame.select("step_id", "execute_model_us", "get_finished_us").rows()
    assert rows == [(0, 120.0, 3.0), (1, 130.0, 1.0)]
    assert found.frame["bind_us"].null_count() == 2


def test_a_step_id_twice_is_an_error(tmp_path: Path):
    lines = [HEADER, engine_record(0), engine_record(1), engine_record(1)]
    write_lines(tmp_path / "engine_step.jsonl", lines)
    with pytest.raises(RecordsError, match="step_id 1 twice"):
        read_engine_steps(tmp_path, [PhaseStart("growth", FIRST_NS)])


def test_a_driver_that_was_killed_fails_the_trial(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    path = folder / "plain" / "r0" / "requests.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    trial = load_trial(folder, "plain", 0)
    assert trial.steps is None and "driver was killed" in (trial.error or "")


def test_requests_that_do_not_reconcile_fail_the_trial(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    path = folder / "plain" / "r0" / "requests.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    del lines[3]
    path.write_text("".join(lines))
    trial = load_trial(folder, "plain", 0)
    assert trial.steps is None and "do not reconcile" in (trial.error or "")


def test_a_planned_trial_that_never_ran_is_told(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    run = json.loads((folder / "run.json").read_text())
    run["plan"].append({"config": "noop", "repeat": 0})
    (folder / "run.json").write_text(json.dumps(run))
    _, trials = load_run(folder)
    assert [trial.error is None for trial in trials] == [True, False]


def test_overhead_is_scheduler_and_connector_without_the_model():
    steps = pl.DataFrame(
        {
            "schedule_us": [50.0, 50.0],
            "update_us": [30.0, 30.0],
            "bind_us": [1.0, None],
            "start_load_kv_us": [2.0, None],
            "wait_for_save_us": [None, None],
            "get_finished_us": [7.0, None],
            "execute_model_us": [2_000.0, None],
        }
    )
    # Without a worker record the connector's part is unknown, not zero.
    assert steps.select(overhead_us([])).to_series().to_list() == [90.0, None]


def test_a_trial_that_was_sent_late_counts_for_what_is_held_alone(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=4_000)
    path = folder / "plain" / "r0" / "requests.jsonl"
    path.write_text(path.read_text().replace('"valid":true', '"valid":false'))
    trial = load_trial(folder, "plain", 0)
    assert trial.late and trial.error is None
    assert trial.steps["phase"].unique().to_list() == [Phase.HOLD]
    entry = analyse(*load_run(folder), None).document.configs["plain"]
    assert entry.verdict_of["schedule"] == "flat"
    assert entry.tpot_ms is None and entry.growth_slope_us_per_1k_blocks is None
    assert any("sent late" in warning for warning in entry.warnings)
