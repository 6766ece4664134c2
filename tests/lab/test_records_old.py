# SPDX-License-Identifier: Apache-2.0
"""Runs from before the structs are read: old_run/ has lines as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.instances import read_instances
from lab.records.arm import ArmRecord
from lab.records.decisions import DecisionEnd, DecisionRecord, DecisionsHeader
from lab.records.documents import read_document
from lab.records.lines import read_lines
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader
from lab.records.requests import (
    DriverEnd,
    PhaseStart,
    RequestRecord,
    RequestsHeader,
    read_requests,
)
from lab.records.run import PlanEntry, RunRecord
from lab.records.step_table import read_steps
from lab.records.steps import (
    WORKER_TIMES,
    EngineHeader,
    EngineStep,
    WorkerHeader,
    WorkerStep,
    first_step,
)
from lab.records.trial import TrialRecord

OLD = Path(__file__).parent / "old_run"
DOCUMENTS = {"run.json": RunRecord, "trial.json": TrialRecord, "arm.json": ArmRecord}
LINES: dict[str, tuple[type[msgspec.Struct], Any]] = {
    "engine_step.jsonl": (EngineHeader, EngineStep),
    "worker_step.r0.jsonl": (WorkerHeader, WorkerStep),
    "requests.jsonl": (RequestsHeader, PhaseStart | RequestRecord | DriverEnd),
    "replay.jsonl": (ReplayHeader, ReplayedRequest | ReplayEnd),
    "decisions.jsonl": (DecisionsHeader, DecisionRecord | DecisionEnd),
}


def is_kept(old: Any, now: Any) -> bool:
    """Whether all that `old` holds is in `now`, which may hold more."""
    if isinstance(old, dict):
        return isinstance(now, dict) and all(
            name in now and is_kept(value, now[name]) if value is not None else True
            for name, value in old.items()
        )
    if isinstance(old, list):
        return len(old) == len(now) and all(map(is_kept, old, now))
    return old == now


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_of_an_old_document_is_lost(name: str) -> None:
    old = msgspec.json.decode((OLD / name).read_bytes())
    now = msgspec.to_builtins(read_document(OLD / name, DOCUMENTS[name]))
    assert is_kept(old, now)


@pytest.mark.parametrize("name", LINES)
def test_nothing_of_an_old_line_is_lost(name: str) -> None:
    old = [msgspec.json.decode(line) for line in (OLD / name).read_bytes().splitlines()]
    found = read_lines(OLD / name, *LINES[name])
    now = [msgspec.to_builtins(one) for one in (found.header, *found.records)]
    assert is_kept(old, now)
    assert found.torn_lines == 0


def test_old_step_files_are_tables_too() -> None:
    engine = read_steps(
        OLD / "engine_step.jsonl", EngineHeader, ("step_id", "cache_size", "step_us")
    )
    assert engine.frame["cache_size"].to_list() == [256, 256, 3284]
    worker = read_steps(
        OLD / "worker_step.r0.jsonl", WorkerHeader, ("step_id", *WORKER_TIMES)
    )
    assert worker.frame["wait_for_save_us"].null_count() == 1
    assert first_step(OLD / "engine_step.jsonl").found_blocks(16) == 0


def test_an_old_run_says_what_it_said() -> None:
    run = read_document(OLD / "run.json", RunRecord)
    assert run.configs is None
    assert run.plan[0] == PlanEntry("plain", 0)
    requests = read_requests(OLD / "requests.jsonl")
    assert [phase.name for phase in requests.phases] == [
        "growth",
        "plateau",
        "after_reset",
    ]
    assert [one.name for one in read_instances(OLD / "instances.json")] == ["i0", "i1"]


def test_what_is_lost_would_be_seen() -> None:
    assert not is_kept({"a": {"b": [1]}}, {"a": {}})
    assert not is_kept({"a": 1}, {"a": 2})
    assert is_kept({"a": None}, {})
