# SPDX-License-Identifier: Apache-2.0
"""Step files become the table of decode-only steps, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.records import RecordsError
from kvtax.records.requests import CpuReading, Phase, PhaseStart, Requests
from kvtax.records.steps import STEPS, EngineStep, ThreadsHeader, WorkerStep
from kvtax.steps.forwards import with_forwards
from kvtax.steps.life import recorded_steps, whole_steps
from kvtax.steps.parts import side_parts, step_parts
from kvtax.steps.trial_steps import read_holds, trial_steps
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run, load_trial
from tests.harness import made_up
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
        PhaseStart("hold.0.0.8", FIRST_NS, reset_ns=FIRST_NS + 6 * STEP_NS),
    ]
    engine = trial_steps(0, recorded_steps(tmp_path / STEPS).table, phases)
    assert engine["phase"].to_list() == [0] * 6 + [3] * 4


def test_prompts_that_probe_the_cache_belong_to_no_phase(tmp_path: Path):
    lines = [HEADER] + [engine_record(step) for step in range(10)]
    write_lines(tmp_path / "engine_step.jsonl", lines)
    reset_ns, probe_ns = FIRST_NS + 6 * STEP_NS, FIRST_NS + 4 * STEP_NS
    phases = [
        PhaseStart("long.0.4.8", FIRST_NS),
        PhaseStart("hold.1.0.8", FIRST_NS + 7 * STEP_NS, reset_ns, probe_ns),
    ]
    engine = trial_steps(0, recorded_steps(tmp_path / STEPS).table, phases)
    long, hold = int(Phase.LONG), int(Phase.HOLD)
    assert engine["phase"].to_list() == [long] * 4 + [hold] * 4


def test_a_step_has_the_place_of_its_hold_and_the_age_of_the_cache(tmp_path: Path):
    lines = [HEADER] + [engine_record(step) for step in range(12)]
    write_lines(tmp_path / "engine_step.jsonl", lines)
    names = ["growth", "fill.0.2.8.decoders", "hold.0.2.8", "fill.1.4.32"]
    names += ["hold.1.4.32", "fill.2.0.8.decoders"]
    phases = []
    for number, name in enumerate(names):
        start_ns = FIRST_NS + 2 * number * STEP_NS
        reset_ns = start_ns if name in (names[1], names[5]) else None
        phases.append(PhaseStart(name, start_ns, reset_ns))
    engine = trial_steps(0, recorded_steps(tmp_path / STEPS).table, phases)
    fill, hold = int(Phase.FILL), int(Phase.HOLD)
    assert engine["phase"].to_list()[::2] == [0, fill, hold, fill, hold, fill]
    assert engine["hold"].to_list()[::2] == [0, 0, 0, 1, 1, 2]
    assert engine["level"].to_list()[::2] == [0, 2, 2, 4, 4, 0]
    assert engine["decoders"].to_list()[::2] == [0, 8, 8, 32, 32, 8]
    steps_of_age = (engine["age_s"] * 1e9 / STEP_NS).round().to_list()
    assert steps_of_age == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


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
    engine = [engine_record(step, t_ns=1) for step in range(2)]
    write_lines(tmp_path / STEPS, [HEADER, *engine])
    table = whole_steps(tmp_path)
    assert table.worker_records == 5
    rows = table.table.select("step_id", "execute_model_us", "get_finished_us").rows()
    assert rows == [(0, 120.0, 3.0), (1, 130.0, 1.0)]
    assert table.table["bind_us"].null_count() == 2


def test_a_stage_that_waits_for_the_one_before_counts_that_time_once(tmp_path: Path):
    for stage, began_us in enumerate((0, 600)):
        header = {"schema": "kvtax.worker_step/1", "stage": stage}
        record = {"step_id": 0, "t_ns": 1 + 1_000 * began_us, "get_finished_us": 4.0}
        record["execute_model_us"] = 1_000.0
        write_lines(tmp_path / f"worker_step.r{stage}.jsonl", [header, record])
    step = engine_record(0, t_ns=1, step_us=2_000.0)
    write_lines(tmp_path / STEPS, [HEADER, step])
    table = whole_steps(tmp_path).table
    rows = table.select("execute_model_us", "get_finished_us").rows()
    assert rows == [(1_600.0, 8.0)]


@pytest.mark.parametrize("later_ns", [0, 1])
def test_a_step_id_twice_is_an_error(tmp_path: Path, later_ns: int):
    """Another step of the same number, or a copy of the step."""
    again = engine_record(1)
    again["t_ns"] += later_ns
    lines = [HEADER, engine_record(0), engine_record(1), again]
    write_lines(tmp_path / STEPS, lines)
    with pytest.raises(RecordsError, match="twice"):
        whole_steps(tmp_path)


@pytest.mark.parametrize(
    ("lost", "why"), [(-1, "driver was killed"), (3, "do not reconcile")]
)
def test_requests_of_which_a_line_is_lost_fail_the_trial(tmp_path: Path, lost, why):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    path = folder / "plain" / "r0" / "requests.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    del lines[lost]
    path.write_text("".join(lines))
    trial = load_trial(folder, "plain", 0)
    assert trial.steps is None and why in (trial.error or "")


def test_a_planned_trial_that_never_ran_is_told(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    run = json.loads((folder / "run.json").read_text())
    run["plan"].append({"config": "noop", "repeat": 0})
    (folder / "run.json").write_text(json.dumps(run))
    _, trials = load_run(folder)
    assert [trial.error is None for trial in trials] == [True, False]


METHOD_TIMES = ["scheduler.build_connector_meta_us", "worker.get_finished_us"]


def test_parts_add_up_to_the_step_and_overhead_leaves_out_the_model():
    steps = pl.DataFrame(
        {
            "step_us": [2_200.0, 2_200.0],
            "schedule_us": [50.0, 50.0],
            "update_us": [30.0, 30.0],
            "scheduler.build_connector_meta_us": [20.0, None],
            "worker.get_finished_us": [7.0, None],
            "execute_model_us": [2_000.0, None],
        }
    ).select(**step_parts(METHOD_TIMES))
    assert steps["model_us"].to_list() == [1_993.0, 0.0]
    assert steps["scheduler_us"].to_list() == [60.0, 80.0]
    assert steps["connector_us"].to_list() == [27.0, 0.0]
    assert steps["other_us"].to_list() == [120.0, 2_120.0]
    # Without a worker record the connector's part is unknown, not zero.
    assert steps["worker_calls_us"].to_list() == [7.0, None]
    assert steps["overhead_us"].to_list() == [87.0, None]
    of_plain = step_parts([])["connector_us"]
    assert pl.DataFrame({"step_us": [1.0]}).select(of_plain).item() is None


@given(st.lists(st.tuples(*[st.floats(0, 1e4)] * 5), min_size=1, max_size=20))
def test_records_one_by_one_are_split_as_a_table_of_them_is(times):
    engine = [
        EngineStep(0, 0, schedule_us=a, update_us=b, build_meta_us=c)
        for a, b, c, _, _ in times
    ]
    worker = [WorkerStep(0, 0, d, get_finished_us=e) for _, _, _, d, e in times]
    meta, finished = METHOD_TIMES
    columns = ["schedule_us", "update_us", meta, "execute_model_us", finished]
    table = pl.DataFrame(times, columns, orient="row").with_columns(step_us=0.0)
    parts = table.select(**step_parts(METHOD_TIMES))
    sides = {"scheduler_us": engine, "model_us": worker}
    for part, records in sides.items():
        split = [side_parts(record)[0] for record in records]
        assert parts[part].to_list() == pytest.approx(split, rel=1e-6)
    calls = [side_parts(record)[2] for record in (*engine, *worker)]
    total = sum(us for by_method in calls for us in by_method.values())
    connector_us = parts["connector_us"].cast(pl.Float64).sum()
    assert connector_us == pytest.approx(total, rel=1e-5)


def test_a_trial_that_was_sent_late_counts_for_what_is_held_alone(tmp_path: Path):
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=4_000)
    path = folder / "plain" / "r0" / "requests.jsonl"
    path.write_text(path.read_text().replace('"valid":true', '"valid":false'))
    trial = load_trial(folder, "plain", 0)
    assert trial.late and trial.error is None
    assert trial.steps["phase"].unique().to_list() == [Phase.HOLD]
    entry = analyse(*load_run(folder), None).document.configs["plain"]
    assert entry.verdict_of["timed"] == "flat"
    assert entry.tpot_ms is None and entry.growth_slope_us_per_1k_blocks is None
    assert any("sent late" in warning for warning in entry.warnings)


def test_readings_of_a_hold_are_those_between_its_edges_per_step(tmp_path: Path):
    steps = pl.DataFrame({"t_ns": [100, 110, 120, 130, 140, 210, 220]})
    names = {"io#7": 1.0, "io#8": 1.0, "MainThread#1": 1.0, "records-of-mine#9": 1.0}
    names |= {"recorder writer#5": 1.0, "vllm output#6": 1.0}
    lines = pl.DataFrame({"t_ns": 1, "step_id": 1, "threads": [names]})
    made_up.write_lines(tmp_path / "threads.jsonl", ThreadsHeader(pid=1), [lines])
    phases = [PhaseStart("hold.0.3.8", 90), PhaseStart("hold.1.0.8", 200)]
    requests = Requests(
        0,
        phases,
        [
            CpuReading(95, 1_000, {7: 500, 1: 900}, waited_ns={1: 100}),
            # A thread of no name in the engine's process is another process's.
            CpuReading(
                145,
                6_000,
                {7: 2_500, 8: 1_000, 1: 4_400, 44: 900, 5: 900},
                anonymous_kib=2_048,
                waited_ns={1: 600},
            ),
            CpuReading(205, 9_000, {7: 2_500, 8: 1_000, 9: 0}),
            CpuReading(225, 9_900, {8: 1_000, 9: 400}),
        ],
        [],
        None,
        0,
    )
    readings = read_holds(2, steps, requests, tmp_path / "threads.jsonl")
    first, second = readings.to_dicts()
    place = {"repeat": 2, "hold": 0, "level": 3, "decoders": 8}
    assert first.items() >= place.items()
    # Five steps of 5,000 ns; two threads of one name, 2,000 and 1,000 ns.
    assert (first["processes"], first["engine"]) == (1.0, 0.7)
    assert first["thread io"] == pytest.approx(0.6)
    assert first["thread records-of-mine"] == 0.0
    assert (first["waited"], first["memory"]) == (0.1, 2.0)
    # Thread 7 has ended: what it took is not known, and not below nothing.
    assert (second["hold"], second["processes"]) == (1, 0.45)
    assert second["thread io"] == 0.0
    assert second["thread records-of-mine"] == pytest.approx(0.2)
    assert second["engine"] is second["memory"] is None
    unread = Requests(0, phases, [], [], None, 0)
    assert not read_holds(0, steps, unread, tmp_path / "none").height


def test_the_sleep_of_a_step_is_that_of_the_forward_which_ended_in_it(tmp_path: Path):
    steps = pl.DataFrame(
        {
            "t_ns": [1_000, 4_000, 9_000],
            "step_us": [2.0, 2.0, 2.0],
            "step_id": [0, 1, 2],
        }
    )
    file = tmp_path / "forward_times.int64"
    rows = np.array([[2_500, 900], [5_000, 1_700], [8_000, 5], [0, 0], [0, 0]])
    rows.astype(np.int64).tofile(file)
    slept = with_forwards(steps, file, 2_000.0)["forward_us"].to_list()
    assert slept == [0.9, 1.7, None]
    # Where it was not recorded it is what the profile says, or not known.
    none = tmp_path / "none"
    assert with_forwards(steps, none, 2.0)["forward_us"].to_list() == [2.0] * 3
    assert with_forwards(steps, none, None)["forward_us"].null_count() == 3


# Steps of one server, as its files have them: an arrival, a decode with a connector's
# calls, one that an overlapping step was joined to, and one without a worker's record.
ENGINE = [
    {"step_id": 0, "t_ns": FIRST_NS, "schedule_us": 40.0, "build_meta_us": 4.0,
     "step_us": 400.0, "scheduled": 2, "prefill_tokens": 512, "decode_tokens": 1,
     "cache_size": 32, "update_us": 20.0},
    {"step_id": 1, "t_ns": FIRST_NS + STEP_NS, "schedule_us": 50.0,
     "build_meta_us": 5.0, "step_us": 300.0, "scheduled": 2, "prefill_tokens": 0,
     "decode_tokens": 2, "cache_size": 33, "update_us": 10.0,
     "schedule_cpu_us": 45.0, "update_cpu_us": 8.0, "thread_cpu_us": 70.0,
     "connector_calls": {"update_connector_output": 3},
     "connector_self_us": {"update_connector_output": 6.0}},
    {"step_id": 2, "t_ns": FIRST_NS + 2 * STEP_NS, "schedule_us": 60.0,
     "build_meta_us": 7.0, "step_us": 350.0, "scheduled": 2, "prefill_tokens": 0,
     "decode_tokens": 2, "cache_size": 33, "update_us": 30.0,
     "connector_calls": {"update_connector_output": 2}},
    {"step_id": 3, "t_ns": FIRST_NS + 3 * STEP_NS, "schedule_us": 70.0,
     "build_meta_us": 8.0, "step_us": 360.0, "scheduled": 2, "prefill_tokens": 0,
     "decode_tokens": 2, "cache_size": 34, "update_us": 30.0},
]  # fmt: skip
WORKER = [
    {"step_id": 0, "t_ns": FIRST_NS, "execute_model_us": 300.0, "bind_us": 1.0,
     "start_load_kv_us": 2.0, "get_finished_us": 3.0},
    {"step_id": 2, "t_ns": FIRST_NS + 2 * STEP_NS, "execute_model_us": 250.0,
     "bind_us": 1.5,
     "start_load_kv_us": 20.0, "get_finished_us": 9.0,
     "connector_self_us": {"start_load_kv": 12.0, "wait_for_layer_load": 8.0},
     "connector_us": {"start_load_kv": 20.0},
     "connector_calls": {"wait_for_layer_load": 4}},
    {"step_id": 1, "t_ns": FIRST_NS + STEP_NS, "execute_model_us": 200.0,
     "bind_us": 1.0,
     "start_load_kv_us": 2.0, "get_finished_us": 5.0},
]  # fmt: skip
ENGINE_METHODS = ["build_connector_meta", "update_connector_output"]
WORKER_METHODS = ["bind_connector_metadata", "start_load_kv", "wait_for_layer_load"]
WORKER_METHODS += ["get_finished"]


@pytest.fixture
def steps(tmp_path: Path) -> pl.DataFrame:
    """The table of the steps above."""
    folder = write_run(tmp_path, [Truth("plain")], repeats=1, steps=400)
    trial = folder / "plain" / "r0"
    for name, header, methods, records in (
        ("engine_step", "kvtax.engine_step/1", ENGINE_METHODS, ENGINE),
        ("worker_step.r0", "kvtax.worker_step/1", WORKER_METHODS, WORKER),
    ):
        first = {"schema": header, "methods": methods}
        write_lines(trial / f"{name}.jsonl", [first, *records])
    loaded = load_trial(folder, "plain", 0)
    assert (loaded.engine_steps, loaded.worker_steps) == (4, 3)
    assert loaded.engine_without_worker == 1
    assert loaded.steps is not None
    return loaded.steps


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("step_id", [0, 1, 2, 3]),
        ("batch", [2, 2, 2, 2]),
        ("tokens", [513, 2, 2, 2]),
        ("cache_blocks", [32, 33, 33, 34]),
        ("prefills", [True, False, False, False]),
        ("decode_only", [False, True, True, True]),
        # The worker's file has its steps in another order, and lacks the last.
        ("execute_model_us", [300.0, 200.0, 250.0, None]),
        # One call each, where the record does not say more.
        ("scheduler.build_connector_meta_us", [4.0, 5.0, 7.0, 8.0]),
        ("scheduler.build_connector_meta_calls", [1, 1, 1, 1]),
        # Two calls that were not timed take as long as those that were: 2 us each.
        ("scheduler.update_connector_output_us", [None, 6.0, 4.0, None]),
        ("scheduler.update_connector_output_calls", [None, 3, 2, None]),
        # Less the method that it called.
        ("worker.start_load_kv_us", [2.0, 2.0, 12.0, None]),
        ("worker.wait_for_layer_load_us", [None, None, 8.0, None]),
        ("worker.wait_for_layer_load_calls", [None, None, 4, None]),
        ("worker.get_finished_us", [3.0, 5.0, 9.0, None]),
        # 1 + 2 + 3; 1 + 2 + 5; 1.5 + 12 + 8 + 9.
        ("worker_calls_us", [6.0, 8.0, 30.5, None]),
        # With build_meta and update_connector_output.
        ("connector_us", [10.0, 19.0, 41.5, 8.0]),
        # schedule() and update, and the calls in the worker.
        ("overhead_us", [66.0, 68.0, 120.5, None]),
    ],
)
def test_a_step_has_its_parts_and_their_sums(steps: pl.DataFrame, column, expected):
    assert steps[column].to_list() == expected


def test_a_step_that_did_not_end_is_no_step_of_a_phase(tmp_path):
    unended = {"step_id": 1, "t_ns": FIRST_NS + STEP_NS}
    records = [engine_record(step) for step in (0, 2, 3)]
    write_lines(tmp_path / STEPS, [HEADER, *records, unended])
    phases = [PhaseStart("growth", FIRST_NS)]
    table = trial_steps(0, recorded_steps(tmp_path / STEPS).table, phases)
    assert table["step_id"].to_list() == [0, 2, 3]


def test_a_bad_line_is_an_error_of_a_trial(tmp_path):
    write_lines(tmp_path / STEPS, [HEADER, engine_record(0), {"step_id": 4}])
    with pytest.raises(RecordsError, match=r"engine_step.jsonl:3: bad record"):
        whole_steps(tmp_path)
