# SPDX-License-Identifier: Apache-2.0
"""What no call of a connector shows, the clocks do."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from recorder_connectors import SPAWNED_US, Burner
from recorder_lab import config, new_engine, recording
from vllm.v1 import step_records

from lab.records.lines import read_lines
from lab.records.steps import EngineHeader, EngineStep
from lab.records.threads import ThreadsHeader, ThreadTimes
from lab.serving.null_engine import NOOP

PATCHES = ["step_timing_v1", "step_timing_v2"]
SERVED_S = 2.6
PAUSE_S = 0.005


def serve(model, folder, connector) -> tuple[list[EngineStep], list[ThreadTimes]]:
    """The records of an engine that decodes for a while, and of its threads."""
    Burner.stopped.clear()
    with recording(folder):
        engine = new_engine(connector, model)
        engine.decode_batch(1, int(SERVED_S / PAUSE_S))
        end = time.monotonic() + SERVED_S
        while time.monotonic() < end:
            engine.core.step()
            time.sleep(PAUSE_S)
        Burner.stopped.set()
    steps = read_lines(folder / "engine_step.jsonl", EngineHeader, EngineStep)
    threads = read_lines(folder / "threads.jsonl", ThreadsHeader, ThreadTimes)
    return steps.records, threads.records


@pytest.fixture(scope="session")
def idle(model, tmp_path_factory):
    return serve(model, tmp_path_factory.mktemp("idle"), NOOP)


@pytest.fixture(scope="session")
def burning(model, tmp_path_factory):
    return serve(model, tmp_path_factory.mktemp("burning"), config("Burner"))


def test_a_thread_that_takes_a_core_shows_with_what_it_took(idle, burning):
    while not Burner.took_us:
        time.sleep(0.01)
    shown_us = sum(record.threads["burner"] for record in burning[1])
    # There is no record of its last moments.
    assert 0.6 * Burner.took_us[0] < shown_us <= Burner.took_us[0]
    assert not any("burner" in record.threads for record in idle[1])


def test_the_threads_are_those_of_the_process_four_times_a_second(idle):
    steps, threads = idle
    lasted_s = (threads[-1].t_ns - steps[0].t_ns) / 1e9
    # Fewer where the machine stalls; the last one is made when the process ends.
    assert 5 <= len(threads) <= 4 * lasted_s + 2
    began = {step.step_id: step.t_ns for step in steps}
    for record in threads:
        # The newest step, however long that one was held up.
        assert began[record.step_id] <= record.t_ns
        assert record.t_ns - 0.3e9 < began.get(record.step_id + 1, record.t_ns)
        assert "MainThread" in record.threads
        # Earlier tests have left others of that name.
        assert any(name.startswith("records-threads") for name in record.threads)
        assert min(record.threads.values()) >= 0
        assert sum(record.threads.values()) < 1.3e6 * os.cpu_count()


@pytest.fixture(scope="session")
def spawning(model, tmp_path_factory):
    return serve(model, tmp_path_factory.mktemp("spawning"), config("Spawner"))


def test_threads_that_have_ended_by_the_next_record_show_as_well(idle, spawning):
    def ended_us(threads: list[ThreadTimes]) -> float:
        return sum(record.threads["ended threads"] for record in threads)

    steps, threads = spawning
    burnt_us = SPAWNED_US * sum(step.step_id > 0 for step in steps)
    assert 0.8 * burnt_us < ended_us(threads) < 2 * burnt_us
    assert ended_us(idle[1]) < 0.05 * burnt_us


def test_threads_from_before_the_connector_are_told_from_its_own(burning):
    """Those of the model executor, and not one of the connector's is among them."""
    of_connector = sum(record.threads["burner"] for record in burning[1])
    of_executor = sum(record.threads["model executor"] for record in burning[1])
    assert of_executor < 0.2 * of_connector


def test_times_are_those_since_the_step_before(idle):
    steps, _ = idle
    assert steps[0].thread_cpu_us is None
    lasted_us = (steps[-1].t_ns - steps[1].t_ns) / 1e3
    # It slept between the steps.
    assert sum(step.thread_cpu_us for step in steps[1:]) < 0.7 * lasted_us
    for step in steps[1:]:
        assert 0 < step.schedule_cpu_us + step.update_cpu_us < step.thread_cpu_us


def test_what_follows_a_step_is_not_in_the_step_that_is_open_meanwhile(
    tmp_path, monkeypatch
):
    def slow_end(recorder, step):
        time.sleep(0.05)

    recorder = step_records.EngineStepRecorder(str(tmp_path))
    monkeypatch.setattr(step_records.EngineStepRecorder, "_end_step_of_v2", slow_end)
    outputs = SimpleNamespace(), SimpleNamespace()
    began_ns = time.perf_counter_ns()
    for output in outputs:
        step = recorder._begin_step(output, time.perf_counter_ns())
        step.schedule_us, step.cache_size = 1.0, 0
    for output in outputs:
        recorder.end_step(output)
    lasted_us = (time.perf_counter_ns() - began_ns) / 1e3
    recorder._file.flush()
    first, second = read_lines(
        tmp_path / "engine_step.jsonl", EngineHeader, EngineStep
    ).records
    assert first.step_us < lasted_us - 100_000
    assert second.step_us < lasted_us - 100_000
