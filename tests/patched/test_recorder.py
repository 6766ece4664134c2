# SPDX-License-Identifier: Apache-2.0
"""Records: every call and thread has its time, and files keep their limit."""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from recorder_lab import (
    METHODS,
    NUM_BLOCKS,
    SPAWNED_US,
    SPIN_US,
    Burner,
    RayWorker,
    ThroughRay,
    calls_of,
    config,
    new_engine,
    recording,
    run,
    us_of,
)
from vllm.kvtax_probe import record_engine, settings
from vllm.kvtax_probe.engine import EngineRecorder

from kvtax.engine.null_model import NOOP
from kvtax.look.instances import read_instances
from kvtax.records.files import read_lines
from kvtax.records.steps import (
    EngineHeader,
    EngineStep,
    ThreadsHeader,
    ThreadTimes,
    only_life,
)

PATCHES = ["step_timing_v2"]

HOW = ["alone", "with_two_steps_in_flight", "in_multi", "in_the_v2_runners_path"]

# What a step calls, on either side; most were in no record before.
CALLED = {
    "SCHEDULER": {
        *("get_num_new_matched_tokens", "update_state_after_alloc", "take_events"),
        *("build_connector_meta", "of_its_own", "update_connector_output"),
    },
    "WORKER": {
        *("bind_connector_metadata", "start_load_kv", "wait_for_layer_load"),
        *("save_kv_layer", "wait_for_save", "get_finished", "has_connector_metadata"),
        *("get_block_ids_with_load_errors", "get_kv_connector_stats"),
        *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
        *("clear_connector_metadata", "handle_preemptions"),
    },
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def own(times: dict, how: str) -> dict:
    """Those of the connector that knows the truth, by plain name."""
    prefix = "Busy[1]." if how == "in_multi" else ""
    return {
        name.removeprefix(prefix): value
        for name, value in times.items()
        if name.startswith(prefix) and name.count(".") == prefix.count(".")
    }


@pytest.mark.parametrize("how", HOW)
def test_every_call_counts_in_its_step(model, folder, how):
    recorded = run(model, folder, how)
    assert (recorded.scheduled_early > 50) == (how == "with_two_steps_in_flight")
    for step, calls in recorded.pairs():
        assert own(step.connector_calls, how) == calls_of(calls), step


@pytest.mark.parametrize("how", HOW)
def test_what_a_call_takes_is_what_the_connector_took(model, folder, how):
    recorded = run(model, folder, how)
    extra_us = []
    for step, calls in recorded.pairs():
        times = own(step.connector_us, how)
        for name, us in us_of(calls).items():
            assert times[name] > us
            extra_us.append((times[name] - us) / step.connector_calls.get(name, 1))
    assert len(extra_us) > 1_000
    assert statistics.median(extra_us) < SPIN_US / 10


@pytest.mark.parametrize("how", ["alone", "in_the_v2_runners_path"])
def test_both_worker_paths_record_the_four_calls_that_the_report_names(
    model, folder, how
):
    for step in run(model, folder, how).steps["WORKER"].values():
        since_0_30 = "get_transfer_results" in step.connector_us
        last = "get_transfer_results" if since_0_30 else "get_finished"
        fields_us = {
            "bind_connector_metadata": step.bind_us,
            "start_load_kv": step.start_load_kv_us,
            "wait_for_save": step.wait_for_save_us,
            last: step.get_finished_us,
        }
        taken_us = {name: us for name, us in fields_us.items() if us is not None}
        assert set(taken_us) == set(fields_us) & set(step.connector_us)
        for name, us in taken_us.items():
            assert us == step.connector_us[name] > SPIN_US


@pytest.mark.parametrize("side", ["SCHEDULER", "WORKER"])
def test_methods_of_the_whole_interface_are_called_and_named(model, folder, side):
    recorded = run(model, folder, "alone")
    called = set().union(*(s.connector_calls for s in recorded.steps[side].values()))
    assert called >= CALLED[side]
    header = recorded.engine if side == "SCHEDULER" else recorded.worker
    assert set(header.methods) == set(METHODS) >= called


def test_the_null_model_calls_the_hooks_of_each_layer_as_attention_does(model, folder):
    recorded = run(model, folder, "alone")
    for step_id, step in recorded.steps["WORKER"].items():
        computes = recorded.steps["SCHEDULER"][step_id].scheduled > 0
        for name in ("wait_for_layer_load", "save_kv_layer"):
            assert step.connector_calls.get(name, 0) == 48 * computes
    names, shapes, metadata = map(set, zip(*recorded.saved, strict=True))
    assert names == {f"layers.{number}.attention" for number in range(48)}
    # Its dimension was the second one once, after keys and values.
    (shape,) = shapes
    assert NUM_BLOCKS in shape[:2]
    assert metadata == {"CPUAttentionMetadata"}


def test_children_of_a_multi_connector_are_apart_and_add_up(model, folder):
    recorded = run(model, folder, "in_multi")
    for side in recorded.steps.values():
        for step in side.values():
            times, self_us = step.connector_us, step.connector_self_us
            outer = {name for name in times if "[" not in name}
            assert sum(self_us.values()) == pytest.approx(sum(map(times.get, outer)))
            for name in outer:
                children = [times.get(f"{c}.{name}", 0) for c in CHILDREN]
                assert self_us[name] + sum(children) == pytest.approx(times[name])
                assert children[1] > SPIN_US
    assert "NoopConnector[0].build_connector_meta" in recorded.engine.methods
    # It only returns a constant: it has no time that could be taken.
    assert "NoopConnector[0].save_kv_layer" not in recorded.worker.methods
    assert "save_kv_layer" in recorded.worker.methods


CHILDREN = ("NoopConnector[0]", "Busy[1]")


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
    life = only_life(folder)
    steps = read_lines(life / "engine_step.jsonl", EngineHeader, EngineStep)
    threads = read_lines(life / "threads.jsonl", ThreadsHeader, ThreadTimes)
    return steps.records, threads.records


@pytest.fixture(scope="session")
def idle(model, tmp_path_factory):
    return serve(model, tmp_path_factory.mktemp("idle"), NOOP)


@pytest.fixture(scope="session")
def burning(model, tmp_path_factory):
    return serve(model, tmp_path_factory.mktemp("burning"), config("Burner"))


def cpu_us(threads: list[ThreadTimes], name: str) -> float:
    """Sum the CPU time of the threads of this name."""
    return sum(
        us
        for record in threads
        for thread, us in record.threads.items()
        if thread.rpartition("#")[0] == name
    )


def test_threads_show_with_what_they_took_also_if_they_have_ended(idle, burning):
    def named_us(threads: list[ThreadTimes], name: str) -> float:
        return sum(record.threads[name] for record in threads)

    steps, threads = burning
    while not Burner.took_us:
        time.sleep(0.01)
    shown_us = cpu_us(threads, "burner")
    # There is no record of its last moments.
    assert 0.6 * Burner.took_us[0] < shown_us <= Burner.took_us[0]
    assert cpu_us(idle[1], "burner") == 0
    # The threads from before the connector are apart.
    assert named_us(threads, "model executor") < 0.2 * shown_us
    spawned_us = SPAWNED_US * sum(step.step_id > 0 for step in steps)
    assert 0.8 * spawned_us < named_us(threads, "ended threads") < 2 * spawned_us
    assert named_us(idle[1], "ended threads") < 0.05 * spawned_us


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
        assert f"MainThread#{os.getpid()}" in record.threads
        # Earlier tests have left others of that name.
        own = [name for name in record.threads if name.startswith("recorder records")]
        assert own
        assert min(record.threads.values()) >= 0
        assert sum(record.threads.values()) < 1.3e6 * os.cpu_count()


def test_times_are_those_since_the_step_before(idle):
    steps, _ = idle
    assert steps[0].thread_cpu_us is None, "nothing was read before it"
    lasted_us = (steps[-1].t_ns - steps[1].t_ns) / 1e3
    # It slept between the steps.
    assert sum(step.thread_cpu_us for step in steps[1:]) < 0.7 * lasted_us
    for step in steps[1:]:
        assert 0 < step.schedule_cpu_us + step.update_cpu_us < step.thread_cpu_us


def instance_of(folder, connector, model, **engine_args):
    """The records of an engine that has served a request."""
    with recording(folder):
        engine = new_engine(connector, model, **engine_args)
        engine.add([1] * 40, 20)
        engine.run_to_end()
    ((instance,), _) = read_instances(folder)
    assert instance.steps.height > 19
    return instance


def test_a_scheduler_with_its_own_schedule_is_recorded(model, tmp_path):
    own = {"scheduler_cls": "recorder_lab.OwnScheduler"}
    instance = instance_of(tmp_path, NOOP, model, **own)
    assert instance.steps["schedule_us"].min() > SPIN_US
    assert instance.steps["cache_size"].max() == 3
    assert instance.requests.height == 1


def test_a_worker_of_rays_compiled_graph_is_recorded(model, tmp_path):
    if not RayWorker:
        pytest.skip("no Ray, or its workers execute models as all others do")
    instance = instance_of(tmp_path, config("Busy"), model, executor=ThroughRay)
    assert instance.steps["worker.get_finished_us"].min() > SPIN_US
    assert instance.steps["execute_model_us"].min() > SPIN_US


COMPILED = f"""
import time
from connectors.noop import NoopConnector

def work():
    time.sleep({SPIN_US} / 1e6)

class Compiled(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        work()
        return super().build_connector_meta(scheduler_output)

    def take_events(self):
        work()
        yield from ()

    def get_finished(self, finished_req_ids):
        work()
        return None, None

    async def of_an_event_loop(self):
        work()
"""


def test_methods_of_a_compiled_connector_are_timed_or_named(
    model, tmp_path, monkeypatch
):
    pytest.importorskip("Cython")
    (tmp_path / "compiled.py").write_text(COMPILED)
    command = [sys.executable, "-m", "Cython.Build.Cythonize", "-i", "-3"]
    subprocess.run([*command, "compiled.py"], cwd=tmp_path, check=True)
    (tmp_path / "compiled.py").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    connector = config("Compiled") | {"kv_connector_module_path": "compiled"}
    instance = instance_of(tmp_path / "records", connector, model)
    for method in ("scheduler.build_connector_meta", "scheduler.take_events"):
        assert instance.steps[f"{method}_us"].min() > SPIN_US
    assert instance.steps["worker.get_finished_us"].min() > SPIN_US
    not_timed = {w.place for w in instance.warnings if w.kind == "not_timed"}
    assert not_timed == {"scheduler.of_an_event_loop", "worker.of_an_event_loop"}


@pytest.fixture
def logged():
    """Messages of the recorder, whether vLLM lets others hear them or not."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    settings.logger.addHandler(handler)
    yield messages
    settings.logger.removeHandler(handler)


def broken(recorder, *arguments):
    raise LookupError("a field that a later release has no more")


FAULTS = [
    "worker.WorkerRecorder._begin_file",
    "requests.RequestRecorder._begin_file",
    "requests.RequestRecorder.note_scheduled",
    "requests.RequestRecorder.note_first_tokens",
    "requests.RequestRecord",
    "engine._prefill_tokens",
    "engine.EngineRecorder._append_first",
    "connector.ConnectorTimer.take",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_recorder_is_a_message_and_the_engine_serves(
    model, tmp_path, monkeypatch, logged, fault
):
    monkeypatch.setattr(f"vllm.kvtax_probe.{fault}", broken)
    with recording(tmp_path):
        engine = new_engine(config("Busy"), model)
        for _ in range(2):
            engine.add([1] * 40, 20)
            engine.run_to_end()
    # A file of the test before may be closed only now, and names its path.
    own = [line for line in logged if "/" not in line]
    assert all("records" in line and "from here on" in line for line in own)
    # Of the engine, and of the worker, which has its own.
    assert 1 <= len(own) == len(set(own)) <= 2
    assert not engine.core.scheduler.requests


def test_a_fault_of_the_recorder_leaves_what_others_have_wrapped_since(
    model, tmp_path, monkeypatch, logged
):
    monkeypatch.setattr("vllm.kvtax_probe.engine._prefill_tokens", broken)
    with recording(tmp_path):
        engine = new_engine(NOOP, model)
        record_engine(engine.core)
        scheduler, calls = engine.core.scheduler, []
        schedule = scheduler.schedule
        scheduler.schedule = lambda: calls.append(1) or schedule()
        engine.add([1] * 40, 20)
        engine.run_to_end()
    assert len(calls) > 19
    assert logged == ["kvtax: no step records from here on"]


def test_engines_that_need_not_step_together_have_their_own_ranks(model, tmp_path):
    """VLLM sets the rank of each to 0, and keeps its index."""
    parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_index=1)
    with recording(tmp_path):
        scheduler = new_engine(NOOP, model).core.scheduler
        vllm_config = SimpleNamespace(parallel_config=parallel)
        core = SimpleNamespace(scheduler=scheduler, vllm_config=vllm_config)
        recorder = EngineRecorder(core)
    assert "-dp1-" in recorder.life
    assert recorder._header()["dp_rank"] == 1
