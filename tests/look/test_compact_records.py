# SPDX-License-Identifier: Apache-2.0
"""Records as compact as the recorder writes them, against sums over their JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.made_up_servers import write_servers
from kvtax.look.instance_summary import cost
from kvtax.look.instances import read_instances
from kvtax.records.steps import METHOD_FIELDS
from tests.look.conftest import main

STEPS = 2_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compact")
    write_servers(folder, STEPS, 1)
    return folder / "server00"


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def connector_us(record: dict, side: str) -> dict[str, float]:
    """Times by method; those with a field of their own stand only there."""
    fields = METHOD_FIELDS[side].items()
    own = {name: record[field] for name, field in fields if field in record}
    return own | record.get("connector_self_us", {})


def test_parts_are_those_of_a_sum_over_the_lines(folder: Path) -> None:
    engine = records(folder / "engine_step.jsonl")
    workers = {one["step_id"]: one for one in records(folder / "worker_step.r0.jsonl")}
    rows = []
    for step in engine:
        worker = workers[step["step_id"]]
        inside = sum(connector_us(step, "scheduler").values())
        beside = sum(connector_us(worker, "worker").values())
        scheduler = max(step["schedule_us"] + step["update_us"] - inside, 0)
        model = max(worker["execute_model_us"] - beside, 0)
        parts = model, scheduler, inside + beside
        rows.append((*parts, step["step_us"] - sum(parts)))
    ((instance,), warnings) = read_instances(folder)
    assert warnings == instance.warnings == []
    told = cost(instance)
    names = ("model", "scheduler", "connector", "other")
    for part, us in zip(told.parts, np.array(rows).T, strict=True):
        assert part.name == names[told.parts.index(part)]
        assert part.mean_us == pytest.approx(us.mean(), rel=1e-5)
        assert part.most_us == pytest.approx(us.max(), rel=1e-5)
    rare = next(part for part in told.methods if "request_finished" in part.name)
    assert rare.calls_per_step == pytest.approx(1 / 50)


def test_nothing_is_written_that_was_not_measured(folder: Path, capsys) -> None:
    text = (folder / "engine_step.jsonl").read_text().partition("\n")[2]
    assert "null" not in text
    assert len(text) / STEPS < 260
    assert main([str(folder)]) == 0
    assert f"{STEPS:,} steps in" in capsys.readouterr().out
