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


@pytest.mark.parametrize("limit", ["much", "-"])
def test_a_limit_that_is_no_number_stops_the_records_and_not_the_engine(
    tmp_path, monkeypatch, limit
):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_MAX_MB", limit)
    file = written(tmp_path, 40)
    assert file.stopped
    assert list(tmp_path.iterdir()) == []
