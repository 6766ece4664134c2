# SPDX-License-Identifier: Apache-2.0
"""A run that cannot be read is refused with a message that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Truth, write_run

from microbench import report


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
