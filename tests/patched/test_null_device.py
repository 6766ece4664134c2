# SPDX-License-Identifier: Apache-2.0
"""A null device computes beside the host, as a GPU does, and vLLM schedules ahead."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from recorder_lab import recording

from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NOOP, Forward, write_null_model
from kvtax.look.instances import read_instances
from kvtax.records.steps import only_life, read_device_steps
from kvtax.steps.critical_path import exposed

PATCHES = ["step_timing_v2"]

FORWARD_US = 20_000
TOKENS = 30


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow") / "null"
    return write_null_model(folder, 8_192, Forward(FORWARD_US)).folder


def decode(model, folder, monkeypatch, null_device: str) -> float:
    """Two requests decode; us per step, once they have begun."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    kv_transfer_state._KV_CONNECTOR_AGENT = None
    monkeypatch.setenv("KVTAX_STEP_RECORDS_DIR", str(folder))
    with recording(folder):
        engine = NullEngine(model, NOOP, null_device=null_device)
        for _ in range(2):
            engine.add([1] * 20, TOKENS)
        steps_s = []
        core = engine.core
        while core.scheduler.has_requests() or core.batch_queue:
            outputs, _ = core.step_fn()
            if outputs:
                steps_s.append(time.perf_counter())
        core.model_executor.driver_worker.worker.null_device._file.flush()
    took = sorted(b - a for a, b in pairwise(steps_s))
    assert len(steps_s) >= TOKENS
    return 1e6 * took[len(took) // 2]


SCHEDULING = ["sync", "async"]


@pytest.mark.parametrize("null_device", SCHEDULING)
def test_forwards_run_one_after_the_other_for_as_long_as_they_take(
    slow_model, tmp_path, monkeypatch, null_device
):
    decode(slow_model, tmp_path, monkeypatch, null_device)
    device = read_device_steps(only_life(tmp_path) / "device_step.jsonl").records
    assert len(device) >= TOKENS
    for forward in device:
        assert forward.ended_ns - forward.began_ns == FORWARD_US * 1_000
        assert forward.began_ns >= forward.launched_ns
    assert all(a.ended_ns <= b.began_ns for a, b in pairwise(device))


@pytest.mark.parametrize("null_device", SCHEDULING)
def test_the_host_s_work_is_hidden_only_where_steps_overlap(
    slow_model, tmp_path, monkeypatch, null_device
):
    step_us = decode(slow_model, tmp_path, monkeypatch, null_device)
    device = read_device_steps(only_life(tmp_path) / "device_step.jsonl").records
    ((instance,), _) = read_instances(tmp_path)
    table = exposed(instance.steps, device)
    alone = instance.digest.covered_us / instance.steps["step_us"].sum()
    waited_us = table["exposed.scheduler_us"] + table["exposed.model_us"]
    if null_device == "sync":
        assert step_us > FORWARD_US + waited_us.median()
        assert waited_us.median() > 100
        assert alone == pytest.approx(1, abs=1e-3)
    else:
        assert step_us < 1.1 * FORWARD_US
        assert waited_us.median() == 0
        # Two steps are in flight, and their time counts once.
        assert 0.45 < alone < 0.65
