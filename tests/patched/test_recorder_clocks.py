# SPDX-License-Identifier: Apache-2.0
"""What no call of a connector shows, the clocks do."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorder_connectors import Burner
from recorder_lab import config, new_engine, recording
from vllm.v1 import step_clocks, step_records

from lab.records.lines import read_lines
from lab.records.steps import EngineHeader, EngineStep, WorkerHeader, WorkerStep
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


def beside_us(steps: list[EngineStep]) -> float:
    """CPU time of all threads but the engine's."""
    return sum(step.cpu_us - step.thread_cpu_us for step in steps[1:])


def test_a_thread_that_takes_a_core_shows_and_is_named(idle, burning):
    quiet_us, burnt_us = beside_us(idle[0]), beside_us(burning[0])
    assert burnt_us > 3 * quiet_us + 0.3e6
    for record in burning[1]:
        assert max(record.threads, key=record.threads.get) == "burner"
    named_us = sum(record.threads["burner"] for record in burning[1])
    # The threads are read twice a second, so up to half a second is missing.
    assert named_us < burnt_us < 2.5 * named_us
    assert not any("burner" in record.threads for record in idle[1])


def test_the_threads_are_those_of_the_process_twice_a_second(idle):
    steps, threads = idle
    lasted_s = (threads[-1].t_ns - steps[0].t_ns) / 1e9
    assert len(threads) >= 4
    # Where the machine stalls, the next one comes the sooner.
    assert len(threads) == pytest.approx(2 * lasted_s, abs=1)
    began = {step.step_id: step.t_ns for step in steps}
    for record in threads:
        assert record.t_ns - 0.3e9 < began[record.step_id] <= record.t_ns
        assert "MainThread" in record.threads
        # Earlier tests have left others of that name.
        assert any(name.startswith("records-threads") for name in record.threads)
        assert min(record.threads.values()) >= 0
        assert sum(record.threads.values()) < 1.3e6 * os.cpu_count()


def test_times_are_those_since_the_step_before(idle):
    steps, _ = idle
    assert steps[0].cpu_us is steps[0].thread_cpu_us is None
    lasted_us = (steps[-1].t_ns - steps[1].t_ns) / 1e3
    counted = ["run_delay_us"] if Path("/proc/self/schedstat").exists() else []
    for name in ("thread_cpu_us", "cpu_us", *counted):
        values = [getattr(step, name) for step in steps[1:]]
        assert min(values) >= 0
        assert sum(values) < lasted_us * os.cpu_count()
    # It slept between the steps.
    assert sum(step.thread_cpu_us for step in steps[1:]) < 0.7 * lasted_us
    for step in steps[1:]:
        inside_us = step.schedule_cpu_us + step.update_cpu_us
        assert 0 < inside_us < step.thread_cpu_us <= step.cpu_us + 1


def test_the_loop_is_run_now_and_then_and_outside_of_all_other_times(idle):
    steps, _ = idle
    assert all((step.loop_us is None) == (step.step_id % 16 > 0) for step in steps)
    loops = [step.loop_us for step in steps if step.loop_us is not None]
    assert min(loops) > 10
    # In its own step and in the one after it no time is longer for it.
    loop_us = statistics.median(loops)
    for name in ("thread_cpu_us", "cpu_us", "step_us"):
        usual = [getattr(step, name) for step in steps[1:] if step.step_id % 16 > 1]
        with_loop = [getattr(s, name) for s in steps[2:] if s.step_id % 16 <= 1]
        usual_us = statistics.median(usual)
        assert statistics.median(with_loop) < usual_us + max(loop_us, 0.1 * usual_us)


def test_what_follows_a_step_is_not_in_the_step_that_is_open_meanwhile(
    tmp_path, monkeypatch
):
    class SlowClocks:
        def end_step(self, step):
            time.sleep(0.05)

    recorder = step_records.EngineStepRecorder(str(tmp_path))
    monkeypatch.setattr(recorder, "_clocks", SlowClocks(), raising=False)
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


def test_a_kernel_that_counts_no_delays_leaves_it_out(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(step_clocks.os, "open", missing)
    clocks = step_clocks.EngineClocks()
    for step in (EngineStep(1, 1), EngineStep(2, 2)):
        clocks.end_step(step)
    assert step.cpu_us > 0
    assert step.run_delay_us is None


@pytest.mark.parametrize("engine_here", [True, False])
def test_a_worker_in_a_process_of_its_own_has_its_cpu_time(
    tmp_path, monkeypatch, engine_here
):
    folder = str(tmp_path)
    engine = step_records.EngineStepRecorder(folder)
    monkeypatch.setattr(step_records, "ENGINE_STEPS", engine)
    if engine_here:
        engine._begin_step(SimpleNamespace(), 0)
    worker = step_records.WorkerStepRecorder(folder)
    for step_id in range(3):
        worker.begin_step(0, SimpleNamespace(step_id=step_id))
        sum(range(100_000))
        worker.end_execute_model()
    worker._append()
    worker._file.flush()
    file = read_lines(tmp_path / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
    assert len(file.records) == 3
    for step in file.records:
        assert (step.cpu_us is None) == (step.thread_cpu_us is None) == engine_here
        if not engine_here:
            assert 0.5 * step.execute_model_us < step.thread_cpu_us <= step.cpu_us + 5
