# SPDX-License-Identifier: Apache-2.0
"""Records that may stay on keep below a limit, and lose only the oldest."""

from __future__ import annotations

import json

import pytest
from vllm.v1.step_record_file import RecordFile
from vllm.v1.step_records import EngineStep

from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader

PATCHES = ["step_timing_v1", "step_timing_v2"]

MOST_MB = 0.02


def written(folder, steps: int, each: int = 20) -> RecordFile:
    file = RecordFile(str(folder), "engine_step", {"methods": []})
    for first in range(0, steps, each):
        for step_id in range(first, min(first + each, steps)):
            file.append(EngineStep(step_id, 10**15 + step_id, schedule_us=1.5))
        file.flush()
    return file


def step_ids(folder) -> list[int]:
    path = folder / "engine_step.jsonl"
    return read_steps(path, EngineHeader, ["step_id"]).frame["step_id"].to_list()


def test_files_stay_below_the_limit_and_hold_the_newest_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_MAX_MB", str(MOST_MB))
    file = written(tmp_path, 2_000)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"engine_step.jsonl", "engine_step.jsonl.1"}
    # A flush may go over a half by what it writes.
    assert sum(sizes.values()) < MOST_MB * 1e6 * 1.2
    found = step_ids(tmp_path)
    assert found == list(range(found[0], 2_000))
    assert 100 < len(found) < 2_000
    assert not file.stopped


def test_each_part_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_MAX_MB", str(MOST_MB))
    written(tmp_path, 2_000)
    headers = [
        json.loads(path.read_text().partition("\n")[0]) for path in tmp_path.iterdir()
    ]
    assert headers[0] == headers[1]
    assert headers[0]["schema"] == "kvtax.engine_step/1"


def test_without_a_limit_there_is_one_file_with_all_steps(tmp_path):
    written(tmp_path, 2_000)
    assert [path.name for path in tmp_path.iterdir()] == ["engine_step.jsonl"]
    assert step_ids(tmp_path) == list(range(2_000))


def test_a_file_that_is_too_old_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_MAX_HOURS", "2")
    file = written(tmp_path, 100)
    file._began_s -= 3_700
    file.append(EngineStep(100, 10**15 + 100))
    file.flush()
    assert (tmp_path / "engine_step.jsonl.1").is_file()
    assert step_ids(tmp_path) == list(range(101))


@pytest.mark.parametrize("limit", ["much", "-", "-3", "0", "inf", "nan"])
def test_a_limit_that_is_no_number_is_no_limit_and_the_engine_serves(
    tmp_path, monkeypatch, limit
):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_MAX_MB", limit)
    file = written(tmp_path, 2_000)
    assert not file.stopped
    assert step_ids(tmp_path) == list(range(2_000))


def test_of_every_tenth_step_means_are_right_and_the_header_says_so(
    model, tmp_path, monkeypatch
):
    whole, sampled = (decoded(model, tmp_path, monkeypatch, n) for n in (1, 10))
    assert whole.header.every == 1
    assert sampled.header.every == 10
    tenth = [step for step in whole.steps["step_id"] if step % 10 == 0]
    assert sampled.steps["step_id"].to_list() == tenth
    assert len(tenth) > 35
    calls = "scheduler.build_connector_meta_calls"
    assert sampled.steps[calls].mean() == whole.steps[calls].mean() == 1
    # No time of a step that is left out goes to one that is recorded.
    median_us = whole.steps["scheduler.build_connector_meta_us"].median()
    assert sampled.steps["scheduler.build_connector_meta_us"].median() < 3 * median_us


def decoded(model, tmp_path, monkeypatch, every: int):
    """400 steps of an engine, of which one in `every` is recorded."""
    from recorder_lab import new_engine, recording
    from vllm.v1 import step_records

    from lab.serving.null_engine import NOOP
    from look.instances import read_instances

    folder = tmp_path / str(every)
    folder.mkdir()
    monkeypatch.setattr(step_records, "EVERY", every)
    with recording(folder):
        engine = new_engine(NOOP, model, 200)
        engine.add([1] * 20, 400)
        engine.run_to_end()
    ((instance,), _) = read_instances(folder)
    return instance
