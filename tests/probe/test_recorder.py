# SPDX-License-Identifier: Apache-2.0
"""What the recorder writes of steps and calls, on clocks that a table moves."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import make_dataclass
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvtax_probe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtax_probe import connector, engine, files, requests, settings, threads, worker
from kvtax_probe.connector import fill
from kvtax_probe.draw import Draw
from kvtax_probe.engine import EngineRecorder, EngineStep
from kvtax_probe.worker import WorkerRecorder

from tests.proc.living import eventually


@pytest.fixture(autouse=True)
def free_wrappers(monkeypatch):
    """Wrappers that take no time, as on a clock that a test moves."""
    monkeypatch.setattr(connector, "_wrapper_cost", connector.WrapperCost())


METHODS = ["build_connector_meta", "walk", "look_up"]
BUILD, WALK, LOOK_UP = range(3)
US = 1_000


def filled(*calls: tuple[int, int, int, int]) -> dict[str, Any]:
    """What a record says of calls (method, how many, from us, to us), by their ends."""
    record = EngineStep(0, 0, 0.0)
    ns = [(i, n, began * US, end * US if end > 0 else -1) for i, n, began, end in calls]
    fill(record, ns, METHODS, {"build_connector_meta": "build_meta_us"})
    names = {"connector_calls": "calls", "connector_us": "us"}
    names |= {"connector_self_us": "self_us", "build_meta_us": "field"}
    values = {short: getattr(record, name) for name, short in names.items()}
    return {short: value for short, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([], {}),
        # One call of a method with a field: the field says all.
        ([(BUILD, 1, 0, 10)], {"field": 10.0}),
        (
            [(BUILD, 1, 0, 10), (BUILD, 1, 20, 25)],
            {"field": 15.0, "calls": {"build_connector_meta": 2},
             "self_us": {"build_connector_meta": 15.0}},
        ),
        ([(WALK, 1, 5, 12)], {"self_us": {"walk": 7.0}}),
        # A call within a call is no time of the outer method's own.
        (
            [(LOOK_UP, 1, 5, 10), (BUILD, 1, 0, 20)],
            {"field": 20.0, "us": {"build_connector_meta": 20.0},
             "self_us": {"look_up": 5.0, "build_connector_meta": 15.0}},
        ),
        # Two within one; the third came after it.
        (
            [(LOOK_UP, 1, 1, 3), (LOOK_UP, 1, 4, 8), (WALK, 1, 0, 10),
             (LOOK_UP, 1, 11, 12)],
            {"calls": {"look_up": 3}, "us": {"walk": 10.0},
             "self_us": {"look_up": 7.0, "walk": 4.0}},
        ),
        # A method that calls itself: the inner time is within the outer.
        (
            [(WALK, 1, 5, 10), (WALK, 1, 0, 20)],
            {"calls": {"walk": 2}, "self_us": {"walk": 20.0}},
        ),
        (
            [(WALK, 1, 6, 8), (WALK, 1, 5, 10), (WALK, 1, 0, 20), (WALK, 1, 30, 31)],
            {"calls": {"walk": 4}, "self_us": {"walk": 21.0}},
        ),
        # Two that call each other in turn.
        (
            [(WALK, 1, 10, 20), (LOOK_UP, 1, 5, 25), (WALK, 1, 0, 30)],
            {"calls": {"walk": 2}, "us": {"walk": 30.0, "look_up": 20.0},
             "self_us": {"walk": 20.0, "look_up": 10.0}},
        ),
        # Counted alone, and counted beside times that were taken.
        ([(WALK, 40, 0, -1)], {"calls": {"walk": 40}}),
        ([(WALK, 1, 0, 5), (WALK, 3, 0, -1)], {"calls": {"walk": 4}}),
        # What goes on with the work of a call is no further call.
        ([(WALK, 1, 0, 5), (WALK, 0, 10, 16)], {"self_us": {"walk": 11.0}}),
    ],
)  # fmt: skip
def test_calls_and_times_of_methods_count_once(calls, expected):
    assert filled(*calls) == expected


@given(
    st.recursive(
        st.tuples(st.integers(0, 2), st.integers(1, 50), st.just([])),
        lambda inner: st.tuples(
            st.integers(0, 2), st.integers(1, 50), st.lists(inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_own_times_add_up_to_the_time_of_the_outermost_call(tree):
    """Each call takes its own time before, between and after those that it makes."""
    calls: list[tuple[int, int, int, int]] = []
    own = dict.fromkeys(METHODS, 0)
    counts = dict.fromkeys(METHODS, 0)

    def call(node: tuple[int, int, list[Any]], now: int) -> int:
        method, us, inner = node
        began = now
        own[METHODS[method]] += us
        counts[METHODS[method]] += 1
        for child in inner:
            now = call(child, now)
        now += us
        calls.append((method, 1, began, now))
        return now

    whole = call(tree, 0)
    record = filled(*calls)
    names = [name for name, count in counts.items() if count]
    field = {"build_connector_meta": record["field"]} if "field" in record else {}
    own_us = {n: record.get("self_us", {}).get(n, field.get(n)) for n in names}
    assert own_us == {name: own[name] for name in names}
    assert sum(own_us.values()) == whole
    assert {n: record.get("calls", {}).get(n, 1) for n in names} == {
        name: counts[name] for name in names
    }


def drawn(every: int, steps: int) -> list[int]:
    draw, chosen = Draw(every), []
    for step in range(steps):
        if step == draw.next:
            chosen.append(step)
            draw.go_on()
    return chosen


@given(st.integers(1, 40), st.integers(1, 30))
def test_one_step_of_each_block_is_drawn(every, blocks):
    steps = drawn(every, every * blocks)
    assert [step // every for step in steps] == list(range(blocks))


def test_every_step_of_a_block_is_drawn_as_often():
    places = [step % 4 for step in drawn(4, 40_000)]
    assert all(2_300 < places.count(place) < 2_700 for place in range(4))


class Clock:
    """A clock of the process and one of its CPU time, in us."""

    def __init__(self) -> None:
        self.us = self.cpu_us = 1_000

    def passes(self, us: int, cpu_us: int = 0) -> None:
        self.us += us
        self.cpu_us += cpu_us

    def now_ns(self) -> int:
        return self.us * US

    def cpu_ns(self) -> int:
        return self.cpu_us * US


class Base:
    """vLLM's base class of connectors, as far as the recorder looks at it."""

    def request_finished(self) -> None: ...


BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
VLLM: dict[str, dict[str, Any]] = {
    ".".join(BASE.split(".")[: n + 1]): {} for n in range(6)
}
VLLM[BASE] = {"KVConnectorBase_V1": Base}
VLLM["vllm.version"] = {"__version__": "0.0"}


@pytest.fixture
def clock(monkeypatch, tmp_path) -> Clock:
    """The recorder's clocks, its folder, and a vLLM of which it reads the version."""
    clock = Clock()
    for module in (connector, engine, requests, worker):
        monkeypatch.setattr(module, "now_ns", clock.now_ns)
    monkeypatch.setattr(engine, "thread_cpu_ns", clock.cpu_ns)
    monkeypatch.setattr(engine, "CPU_EVERY", 1)
    monkeypatch.setattr(files, "FLUSH_INTERVAL_S", 3_600)
    for module in (engine, worker):
        monkeypatch.setattr(module, "at_exit", lambda close: None)
    monkeypatch.setenv("KVTAX_STEP_RECORDS_DIR", str(tmp_path))
    for name, attributes in VLLM.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(connector, "_timers", {})
    return clock


def recorded(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


class Scheduler:
    """A scheduler whose calls take the time of a table; one request decodes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.running, self.waiting = ["r0", "r1"], ["r2"]
        map_, queue = dict.fromkeys(range(7)), SimpleNamespace(num_free_blocks=5)
        pool = SimpleNamespace(cached_block_hash_to_block=map_, free_block_queue=queue)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        # The end of a prompt, which schedule() counts as computed, and a decode.
        self.requests = {
            "r0": SimpleNamespace(num_computed_tokens=10, num_prompt_tokens=10),
            "r1": SimpleNamespace(num_computed_tokens=21, num_prompt_tokens=10),
        }
        self.tokens = {"r0": 8, "r1": 1}

    def schedule(self) -> SimpleNamespace:
        self.clock.passes(50, 40)
        timer = connector.timer_of("SCHEDULER")
        timer.methods = METHODS
        timer.calls.append(
            (BUILD, 1, self.clock.now_ns() - 9 * US, self.clock.now_ns())
        )
        return SimpleNamespace(
            num_scheduled_tokens=self.tokens,
            total_num_scheduled_tokens=sum(self.tokens.values()),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            preempted_req_ids={"r9"},
        )

    def update_from_output(self, output: Any, model_output: Any) -> None:
        self.clock.passes(20, 15)
        timer = connector.timer_of("SCHEDULER")
        timer.calls.append((WALK, 1, self.clock.now_ns() - 3 * US, self.clock.now_ns()))


def engine_core(clock: Clock) -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_rank=0)
    config = SimpleNamespace(parallel_config=parallel)
    return SimpleNamespace(vllm_config=config, scheduler=Scheduler(clock))


def test_a_step_has_the_times_and_counts_of_its_own_calls(clock, tmp_path):
    core = engine_core(clock)
    recorder = EngineRecorder(core)
    for _ in range(2):
        output = core.scheduler.schedule()
        clock.passes(200, 10)
        core.scheduler.update_from_output(output, None)
        clock.passes(1_000, 5)
    recorder.close()
    first, second = recorded(tmp_path, "engine_step")
    assert (
        first | {"thread_cpu_us": 70.0, "step_id": 1, "t_ns": second["t_ns"]} == second
    )
    assert second == {
        "step_id": 1,
        "t_ns": (1_000 + 1_270) * US,
        "schedule_us": 50.0,
        "build_meta_us": 9.0,
        # 50 + 200 + 20; what follows a step is in none.
        "step_us": 270.0,
        "update_us": 20.0,
        "running": 2,
        "waiting": 1,
        "scheduled": 2,
        "prefill_tokens": 8,
        "decode_tokens": 1,
        "cache_size": 7,
        "free_blocks": 5,
        "preemptions": 1,
        "schedule_cpu_us": 40.0,
        "update_cpu_us": 15.0,
        # Since the step before ended: 5 + 40 + 10 + 15.
        "thread_cpu_us": 70.0,
        "connector_self_us": {"walk": 3.0},
    }


def test_steps_that_overlap_have_their_own_times(clock, tmp_path):
    core = engine_core(clock)
    recorder = EngineRecorder(core)
    core.scheduler.tokens = {"r1": 1}
    first = core.scheduler.schedule()
    clock.passes(100)
    second = core.scheduler.schedule()
    clock.passes(100)
    core.scheduler.update_from_output(first, None)
    core.scheduler.update_from_output(second, None)
    recorder.close()
    steps = recorded(tmp_path, "engine_step")
    assert [step["step_id"] for step in steps] == [0, 1]
    # 50 + 100 + 50 + 100 + 20, and 50 + 100 + 20 + 20.
    assert [step["step_us"] for step in steps] == [320.0, 190.0]
    assert [step["schedule_us"] for step in steps] == [50.0, 50.0]
    assert {step.get("prefill_tokens") for step in steps} == {0}
    assert [step["decode_tokens"] for step in steps] == [1, 1]


def test_what_follows_a_step_is_in_no_step_that_is_open_meanwhile(
    clock, tmp_path, monkeypatch
):
    """Requests are noted for 30 us after the first step, while the second is open."""
    recorder_of_requests = requests.RequestRecorder
    waiting = property(lambda self: {"r1"}, lambda self, value: None)
    monkeypatch.setattr(recorder_of_requests, "without_token", waiting, raising=False)
    monkeypatch.setattr(
        recorder_of_requests, "note_first_tokens", lambda self, step: clock.passes(30)
    )
    core = engine_core(clock)
    recorder = EngineRecorder(core)
    first, second = core.scheduler.schedule(), core.scheduler.schedule()
    core.scheduler.update_from_output(first, None)
    core.scheduler.update_from_output(second, None)
    third = core.scheduler.schedule()
    core.scheduler.update_from_output(third, None)
    recorder.close()
    steps = recorded(tmp_path, "engine_step")
    # 50 + 50 + 20; 50 + 20 + 20 without the 30; and 50 + 20.
    assert [step["step_us"] for step in steps] == [120.0, 90.0, 70.0]


@pytest.mark.parametrize(("every", "steps"), [(1, 12), (3, 4), (12, 1)])
def test_one_step_in_so_many_is_recorded(clock, tmp_path, monkeypatch, every, steps):
    monkeypatch.setattr(engine, "STEPS_EVERY", every)
    core = engine_core(clock)
    recorder = EngineRecorder(core)
    for _ in range(12):
        output = core.scheduler.schedule()
        core.scheduler.update_from_output(output, None)
    recorder.close()
    written = recorded(tmp_path, "engine_step")
    assert len(written) == steps
    # The clock is read after the step before, too, which is not recorded.
    assert all("thread_cpu_us" in step for step in written[1:])
    assert recorder._header()["every"] == every


def test_the_fields_of_a_step_that_travel_leave_all_others_in_place():
    """An instance that has a dict of its own is slower to read for everybody."""
    names = [f"field_{number}" for number in range(16)]
    output_type = make_dataclass("Output", [(name, int, 0) for name in names])
    kvtax_probe._make_room(SimpleNamespace(SchedulerOutput=output_type))
    for _ in range(100):
        output = output_type()
    output.step_id, output.records_life = 1, "life"
    assert not any(isinstance(held, dict) for held in gc.get_referents(output))


def test_a_writer_that_is_killed_tears_at_most_a_line(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FLUSH_INTERVAL_S", 0.001)
    if not (pid := os.fork()):
        try:
            file = files.RecordFile("life", "engine_step", "kvtax.engine_step/1")
            for step_id in count():
                file.append(EngineStep(step_id, 0, 0.0))
                time.sleep(1e-4)
        finally:
            os._exit(1)
    path = tmp_path / "life" / "engine_step.jsonl"
    try:
        eventually(lambda: path.exists() and path.read_bytes().count(b"\n") > 200)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    whole, _, _torn = path.read_bytes().rpartition(b"\n")
    steps = [json.loads(line)["step_id"] for line in whole.splitlines()[1:]]
    assert steps == list(range(len(steps)))


def test_a_workers_step_has_its_time_and_the_calls_until_the_next(clock, tmp_path):
    timer = connector.timer_of("WORKER")
    timer.methods = ["start_load_kv", "get_finished", "save_kv_layer"]
    recorder = WorkerRecorder(
        SimpleNamespace(worker=SimpleNamespace(rank=2), rpc_rank=0)
    )

    def call(method: int, us: int) -> None:
        began = clock.now_ns()
        clock.passes(us)
        timer.calls.append((method, 1, began, clock.now_ns()))

    for step_id in (7, 8):
        output = SimpleNamespace(records_life="life", step_id=step_id)
        recorder.begin_step(output)
        call(0, 4)
        call(2, 1)
        call(2, 2)
        clock.passes(100)
        recorder.ended_ns = clock.now_ns()
        # The V2 runner finishes a step in sample_tokens().
        call(1, step_id)
        clock.passes(1_000)
    recorder.close()
    first, second = recorded(tmp_path, "worker_step.r2")
    assert first == {
        "step_id": 7,
        "t_ns": 1_000 * US,
        "execute_model_us": 107.0,
        "start_load_kv_us": 4.0,
        "get_finished_us": 7.0,
        "connector_calls": {"save_kv_layer": 2},
        "connector_self_us": {"save_kv_layer": 3.0},
    }
    assert (second["step_id"], second["get_finished_us"]) == (8, 8.0)
    assert second["t_ns"] == (1_000 + 1_114) * US


def test_from_0_30_on_get_finished_is_what_the_runner_calls_for_it(clock, tmp_path):
    timer = connector.timer_of("WORKER")
    timer.methods = ["get_finished", "get_transfer_results"]
    recorder = WorkerRecorder(
        SimpleNamespace(worker=SimpleNamespace(rank=0), rpc_rank=0)
    )
    recorder.begin_step(SimpleNamespace(records_life="life", step_id=0))
    timer.calls += [(0, 1, 1 * US, 3 * US), (1, 1, 0, 5 * US)]
    recorder.close()
    (step,) = recorded(tmp_path, "worker_step.r0")
    assert step["get_finished_us"] == 5.0
    own = {"get_finished": 2.0, "get_transfer_results": 3.0}
    assert step["connector_self_us"] == own


class Connector(Base):
    """A connector whose calls take 2 us of their own, and more where it is said."""

    def __init__(self, clock: Clock, layer_us: int = 1) -> None:
        self.clock, self.layer_us = clock, layer_us
        self.role = SimpleNamespace(name="WORKER")

    def start_load_kv(self, layers: int = 0) -> None:
        self.clock.passes(2)
        for layer in range(layers):
            self.wait_for_layer_load(layer)

    def wait_for_layer_load(self, layer: int) -> int:
        self.clock.passes(self.layer_us)
        return layer

    def get_finished(self) -> None:
        raise RuntimeError

    def take_events(self) -> Iterator[int]:
        self.clock.passes(3)
        yield 1
        self.clock.passes(4)


def test_calls_of_a_connector_are_timed_with_what_they_take(clock):
    own = Connector(clock, layer_us=5)
    connector.time_connector(own)
    timer = connector.timer_of("WORKER")
    names = {"start_load_kv", "wait_for_layer_load", "get_finished", "take_events"}
    assert set(timer.methods) == names
    own.start_load_kv(layers=3)
    with pytest.raises(RuntimeError):
        own.get_finished()
    clock.passes(100)
    own.start_load_kv()
    record = EngineStep(0, 0, 0.0)
    fill(record, timer.take(), timer.methods, {})
    assert record.connector_calls == {"wait_for_layer_load": 3, "start_load_kv": 2}
    # 2 + 15, and 2; 4 of it their own.
    assert record.connector_us == {"start_load_kv": 19.0}
    assert record.connector_self_us == {
        "wait_for_layer_load": 15.0,
        "start_load_kv": 4.0,
        "get_finished": 0.0,
    }
    assert not timer.take()
    # One call, whose work is done while the caller goes on.
    for _ in own.take_events():
        clock.passes(50)
    record = EngineStep(0, 0, 0.0)
    fill(record, timer.take(), timer.methods, {})
    assert record.connector_calls is None
    assert record.connector_self_us == {"take_events": 7.0}


@pytest.mark.parametrize(
    ("layers", "us", "is_counted"),
    [(16, 1, False), (17, 1, True), (17, 9, True), (17, 10, False), (100, 5, True)],
)
def test_a_method_of_more_than_16_short_calls_a_step_is_timed_in_drawn_steps(
    clock, layers, us, is_counted
):
    own = Connector(clock, us)
    connector.time_connector(own)
    timer = connector.timer_of("WORKER")

    def step(drawn: bool) -> dict[str, Any]:
        timer.draw(drawn)
        own.start_load_kv(layers)
        record = EngineStep(0, 0, 0.0)
        fill(record, timer.take(), timer.methods, {})
        assert record.connector_calls == {"wait_for_layer_load": layers}
        return record.connector_self_us

    every = {"wait_for_layer_load": float(layers * us), "start_load_kv": 2.0}
    assert step(True) == every
    # Where it is only counted, its time is its caller's.
    undrawn = {"start_load_kv": 2.0 + layers * us} if is_counted else every
    assert step(False) == undrawn
    assert step(True) == every


def test_threads_take_the_cpu_time_since_the_record_before(
    clock, tmp_path, monkeypatch
):
    # By thread id, CPU time in us; and of all threads that ended.
    samples = iter(
        [
            ({1: 100, 2: 10, 3: 0}, 50),
            ({1: 130, 2: 14, 3: 8, 4: 6}, 50),
            # Thread 3 ended at 9 us, and another that was never seen, after 5 us.
            ({1: 130, 2: 15, 4: 6}, 50 + 9 + 5),
        ]
    )

    def sample() -> tuple[dict[int, int], int]:
        by_thread, ended_us = next(samples)
        return {thread: us * US for thread, us in by_thread.items()}, ended_us * US

    monkeypatch.setattr(threads, "_cpu_ns_of_threads", sample)
    monkeypatch.setattr(threads, "_comm", {1: "a", 3: "io", 4: "io"}.__getitem__)
    steps = iter(range(100))
    file = threads.ThreadsFile("life", lambda: next(steps), {2})
    file.flush()
    file.flush()
    first, second = recorded(tmp_path, "threads")
    assert first["threads"] == {
        "model executor": 4.0,
        "ended threads": 0.0,
        "a#1": 30.0,
        "io#3": 8.0,
        "io#4": 6.0,
    }
    assert second["threads"] == {
        "model executor": 1.0,
        # 1 us more of thread 3, and 5 of the other.
        "ended threads": 6.0,
        "a#1": 0.0,
        "io#4": 0.0,
    }


@pytest.mark.parametrize("name", ["recorder records-threads", "vllm out", "MainThread"])
def test_no_thread_can_take_the_name_of_vllms_or_the_recorders(name):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name=name)
    thread.start()
    shown = threads._names({thread.native_id})[thread.native_id]
    ended.set()
    thread.join()
    assert shown == f"thread {name}#{thread.native_id}"


def test_the_main_thread_of_a_forked_process_has_its_name():
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        name = threads._names({os.getpid()})[os.getpid()]
        os.write(writing, name.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 99).decode() == f"MainThread#{pid}"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 16),
        ("1", 1),
        ("8", 8),
        ("2.0", 2),
        ("2.5", 16),
        ("0", 16),
        ("-3", 16),
        ("inf", 16),
        ("nan", 16),
        ("many", 16),
        ("1e9", 10**9),
        ("1e10", 16),
    ],
)
def test_a_number_of_steps_is_read_and_any_other_text_is_the_default(
    monkeypatch, text, expected
):
    monkeypatch.setenv("EVERY", text)
    messages: list[str] = []
    monkeypatch.setattr(
        settings.logger, "error", lambda *arguments: messages.append(arguments)
    )
    assert settings.whole_number("EVERY", 16) == expected
    assert bool(messages) == (text != "" and expected == 16)
