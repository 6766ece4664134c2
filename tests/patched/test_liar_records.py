# SPDX-License-Identifier: Apache-2.0
"""The step records have a lie where it is told, whichever method tells it."""

from __future__ import annotations

import pytest
from liar_lab import CALLED, Liar
from recorder_lab import recording

from connectors.liar import SCHEDULER_METHODS
from lab.records.lines import read_lines
from lab.records.steps import EngineHeader, EngineStep, WorkerHeader, WorkerStep

PATCHES = ["step_timing_v1", "step_timing_v2", "direct_read_hooks"]


@pytest.mark.parametrize("method", CALLED)
def test_a_lie_is_in_the_records_of_its_method(method, model, tmp_path):
    with recording(tmp_path):
        liar = Liar(model, method=method, us=400)
        lies = len(liar.run(requests=2))
    engine = read_lines(tmp_path / "engine_step.jsonl", EngineHeader, EngineStep)
    worker = read_lines(tmp_path / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
    side = engine if method in SCHEDULER_METHODS else worker
    assert any(method in step.connector_self_us for step in side.records)
    # Later releases ask both sides for statistics.
    records = (*engine.records, *worker.records)
    told = [step for step in records if method in step.connector_self_us]
    assert sum(step.connector_calls[method] for step in told) == lies > 0
    for step in told:
        assert step.connector_self_us[method] >= 400 * step.connector_calls[method]
    others_us = [
        us
        for step in records
        for name, us in step.connector_self_us.items()
        if name != method
    ]
    assert sorted(others_us)[len(others_us) // 2] < 100
