# SPDX-License-Identifier: Apache-2.0
"""A real engine that records its steps, with connectors of known cost.

The engine, in the same process, loads the connectors from this module.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import pytest
from overlapping import two_steps_in_flight
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.kvtax_probe import engine as engine_recorder
from vllm.kvtax_probe import install, record_engine
from vllm.kvtax_probe import worker as worker_recorder
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core as core_module
from vllm.v1.executor import ray_utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import kv_connector_model_runner_mixin, worker_base
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from connectors.noop import NoopConnector
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NOOP
from kvtax.records.files import Lines, read_lines
from kvtax.records.steps import (
    EngineHeader,
    EngineStep,
    WorkerHeader,
    WorkerStep,
    calls_by_method,
    method_fields,
    only_life,
)


def connector_output(
    config: VllmConfig,
) -> Callable[..., AbstractContextManager[KVConnectorOutput]]:
    """What takes the place of KVConnectorModelRunnerMixin._get_kv_connector_output.

    The engine's connector must have been made.
    """
    active = ActiveKVConnector(config, {})
    takes = inspect.signature(active.post_forward).parameters

    @contextmanager
    def around_forward(
        scheduler_output, defer_finalize=False, **waits
    ) -> Iterator[KVConnectorOutput]:
        assert not defer_finalize, "only with a draft model"
        output = KVConnectorOutput()
        active.pre_forward(scheduler_output)
        yield output
        # Since 0.30.
        if finish := getattr(active, "finish_forward", None):
            finish()
        finished = scheduler_output
        if "finished_req_ids" in takes:
            finished = scheduler_output.finished_req_ids
        vars(output).update(vars(active.post_forward(finished, **waits)))

    return around_forward


SPIN_US = 100


class Call(NamedTuple):
    """A call of a method, as the connector itself timed it."""

    side: str
    name: str
    us: float


# Calls in their order, and what the lab adds: ("scheduled", step_id) and the like.
LOG: list[tuple] = []
# What was saved: layer, shape of its KV cache, kind of metadata.
SAVED: set[tuple] = set()


class Plain(NoopConnector):
    def request_finished(self, request, block_ids):
        # As MultiConnector asks for it.
        return False, None

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        SAVED.add((layer_name, tuple(kv_layer.shape), type(attn_metadata).__name__))

    def of_its_own(self) -> None:
        """Not in vLLM's interface; build_connector_meta() calls it."""


def _busy(name: str, original: FunctionType) -> FunctionType:
    def method(self, *args, **kwargs):
        began_ns = time.perf_counter_ns()
        while time.perf_counter_ns() - began_ns < SPIN_US * 1e3:
            pass
        if name == "build_connector_meta":
            self.of_its_own()
        result = original(self, *args, **kwargs)
        us = (time.perf_counter_ns() - began_ns) / 1e3
        LOG.append(Call(self.role.name, name, us))
        return result

    return method


# All methods of an instance that anybody may call, whatever the release has.
METHODS = {
    name: getattr(Plain, name)
    for name in dir(Plain)
    if not name.startswith("_") and isinstance(getattr(Plain, name), FunctionType)
}
Busy = type("Busy", (Plain,), {name: _busy(name, METHODS[name]) for name in METHODS})


# CPU time of the thread that Burner starts in each step.
SPAWNED_US = 1_000


class Burner(NoopConnector):
    """A thread of its worker takes a core; each step starts one that soon ends."""

    stopped = threading.Event()
    took_us: ClassVar[list[float]] = []

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            thread = threading.Thread(target=self._burn, name="burner", daemon=True)
            thread.start()

    def _burn(self) -> None:
        text = bytes(1 << 20)
        while not self.stopped.is_set():
            hashlib.sha256(text)  # without the GIL
        self.took_us.append(time.thread_time_ns() / 1e3)

    def start_load_kv(self, forward_context, **kwargs) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    @staticmethod
    def _work() -> None:
        while time.thread_time_ns() < SPAWNED_US * 1_000:
            pass


class OwnScheduler(Scheduler):
    """A scheduler whose schedule() is not vLLM's."""

    def __setattr__(self, name, value):
        if name in ("schedule", "add_request", "_free_request"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def schedule(self, *arguments, **options):
        time.sleep(SPIN_US / 1e6)
        return super().schedule(*arguments, **options)


# None without Ray, and in later releases, whose workers of Ray are as all others.
RayWorker = getattr(ray_utils, "RayWorkerWrapper", None)


class ThroughRay(UniProcExecutor):
    """Has its worker execute the model as Ray's compiled graph does."""

    def execute_model(self, scheduler_output, non_block=False):
        worker = self.driver_worker
        worker.__class__, worker.compiled_dag_cuda_device_set = RayWorker, True
        output: Future = Future()
        output.set_result(worker.execute_model_ray((scheduler_output, None)))
        return output if non_block else output.result()


# So few that requests are preempted.
NUM_BLOCKS = 60
# A tenth of it would do.
MOST_STEPS = 5_000
# What the recorder wraps.
SEAMS = [
    (
        core_module,
        core_module.EngineCore,
        ("add_request", "step", "step_with_batch_queue"),
    ),
    (worker_base, worker_base.WorkerWrapperBase, ("execute_model",)),
    (factory, factory.KVConnectorFactory, ("create_connector",)),
]
if RayWorker:
    SEAMS.append((ray_utils, RayWorker, ("execute_model_ray",)))


def config(name: str) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "recorder_lab",
        "kv_role": "kv_both",
    }


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


CONFIGS = {
    "alone": config("Busy"),
    "with_two_steps_in_flight": config("Busy"),
    "in_multi": multi(NOOP, config("Busy")),
    "in_the_v2_runners_path": config("Busy"),
}


@contextmanager
def recording(folder: Path, **settings: int) -> Iterator[None]:
    """This process records into `folder` what engines made meanwhile do."""
    recorders: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTAX_STEP_RECORDS_DIR", str(folder))
        for module, owner, names in SEAMS:
            patch.setattr(module, "_kvtax_recorded", False, raising=False)
            for name in names:
                patch.setattr(owner, name, vars(owner)[name])
        for module in (engine_recorder, worker_recorder):
            patch.setattr(module, "at_exit", lambda close: recorders.append(close))
            for name, value in {"CPU_EVERY": 1, **settings}.items():
                patch.setattr(module, name, value)
        install()
        yield
        for close in recorders:
            close()


@dataclass
class Recorded:
    """What the files say, and by side and step what the connector knows."""

    engine: EngineHeader
    worker: WorkerHeader
    steps: dict[str, dict[int, EngineStep | WorkerStep]]
    truth: dict[str, dict[int, list[Call]]]
    scheduled_early: int
    saved: set[tuple]

    def pairs(self) -> Iterator[tuple[EngineStep | WorkerStep, list[Call]]]:
        for side, steps in self.steps.items():
            for step_id, step in steps.items():
                yield step, self.truth[side][step_id]


def _by_id(side: str, file: Lines) -> dict[int, Any]:
    """The records by step, with what they leave out."""
    fields = method_fields(side, file.header.methods)
    for step in file.records:
        calls, self_us = calls_by_method(step, fields)
        us = {name: getattr(step, field) for name, field in fields.items()}
        known = {name: value for name, value in us.items() if value is not None}
        step.connector_us = self_us | known | step.connector_us
        step.connector_calls, step.connector_self_us = calls, self_us
    return {step.step_id: step for step in file.records}


def new_engine(
    kv_transfer: dict[str, Any] | None,
    model: Path,
    num_blocks: int = NUM_BLOCKS,
    **engine_args: Any,
) -> NullEngine:
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    return NullEngine(model, kv_transfer, num_blocks, **engine_args)


@cache
def run(model: Path, folder: Path, how: str) -> Recorded:
    folder = folder / how
    folder.mkdir()
    early = how == "with_two_steps_in_flight"
    flight = two_steps_in_flight(NUM_BLOCKS) if early else nullcontext(NUM_BLOCKS)
    with pytest.MonkeyPatch.context() as patch, recording(folder), flight as num_blocks:
        LOG.clear()
        SAVED.clear()
        engine = new_engine(CONFIGS[how], model, num_blocks)
        if how == "in_the_v2_runners_path":
            patch.setattr(
                kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin,
                "_get_kv_connector_output",
                staticmethod(connector_output(engine.core.vllm_config)),
            )
        record_engine(engine.core)
        _note_steps(engine)
        serve(engine, seed=5, requests=30)
    truth = {"SCHEDULER": _of_scheduler(), "WORKER": _of_worker()}
    return Recorded(*read_sides(folder), truth, _scheduled_early(), set(SAVED))


def read_sides(
    folder: Path,
) -> tuple[EngineHeader, WorkerHeader, dict[str, dict[int, EngineStep | WorkerStep]]]:
    """Headers of engine and worker, and by side and step the whole records."""
    life = only_life(folder)
    engine = read_lines(life / "engine_step.jsonl", EngineHeader, EngineStep)
    worker = read_lines(life / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
    sides = {
        "SCHEDULER": _by_id("scheduler", engine),
        "WORKER": _by_id("worker", worker),
    }
    return engine.header, worker.header, sides


def _note_steps(engine: NullEngine) -> None:
    """Where steps begin and end, among the calls of the connector."""
    scheduler, executor = engine.core.scheduler, engine.core.model_executor
    schedule, update = scheduler.schedule, scheduler.update_from_output
    execute = executor.execute_model

    def noted_schedule(*arguments):
        output = schedule(*arguments)
        LOG.append(("scheduled", output.step_id))
        return output

    def noted_update(output, *rest):
        result = update(output, *rest)
        LOG.append(("updated", output.step_id))
        return result

    def noted_execute(output, *rest, **options):
        LOG.append(("executes", output.step_id))
        return execute(output, *rest, **options)

    scheduler.schedule, scheduler.update_from_output = noted_schedule, noted_update
    executor.execute_model = noted_execute


def serve(engine: NullEngine, seed: int, requests: int) -> list[str]:
    """Arrivals, cached prefixes, preemptions and aborts; the aborted requests."""
    chance, aborted = random.Random(seed), []
    prompts = [[n + 1] * chance.randrange(1, 200) for n in range(12)]
    for _ in range(requests):
        request = engine.add(chance.choice(prompts), chance.randrange(1, 60))
        for _ in range(chance.randrange(6)):
            if engine.core.scheduler.has_requests():
                engine.core.step_fn()
        if chance.random() < 0.1 and request in engine.core.scheduler.requests:
            aborted.append(request)
            engine.core.abort_requests([request])
    for _ in range(MOST_STEPS):
        if not (engine.core.scheduler.has_requests() or engine.core.batch_queue):
            return aborted
        engine.core.step_fn()
    raise AssertionError(f"not at an end after {MOST_STEPS} steps")


def _of_scheduler() -> dict[int, list[Call]]:
    """A call counts for the step whose schedule() or update ends next."""
    by_step, calls = defaultdict(list), []
    for entry in LOG:
        if isinstance(entry, Call):
            calls += [entry] if entry.side == "SCHEDULER" else []
        elif entry[0] in ("scheduled", "updated"):
            by_step[entry[1]] += calls
            calls = []
    return by_step


def _of_worker() -> dict[int, list[Call]]:
    """A call counts for the step that the worker began last."""
    by_step, step_id = defaultdict(list), None
    for entry in LOG:
        if not isinstance(entry, Call):
            step_id = entry[1] if entry[0] == "executes" else step_id
        elif entry.side == "WORKER":
            by_step[step_id].append(entry)
    return by_step


def _scheduled_early() -> int:
    """Steps that were scheduled before the one before them was updated."""
    order = [entry for entry in LOG if not isinstance(entry, Call)]
    place = {entry: index for index, entry in enumerate(order)}
    last = max(step_id for _, step_id in order)
    return sum(
        place["scheduled", step_id + 1] < place["updated", step_id]
        for step_id in range(last)
    )


def calls_of(calls: list[Call]) -> Counter[str]:
    return Counter(call.name for call in calls)


def us_of(calls: list[Call]) -> Counter[str]:
    us: Counter[str] = Counter()
    for call in calls:
        us[call.name] += call.us
    return us
