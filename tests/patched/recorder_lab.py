# SPDX-License-Identifier: Apache-2.0
"""A real engine that records its steps, with connectors that know what they cost."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from overlapping import Overlapping
from recorder_connectors import LOG, SAVED, Call
from v2_runner import connector_output
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1 import step_records
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.engine import core as core_module
from vllm.v1.worker import gpu_worker, kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import kv_connector as v2_kv_connector

from lab.records.lines import read_lines
from lab.records.steps import EngineHeader, EngineStep, WorkerHeader, WorkerStep
from lab.serving import null_engine
from lab.serving.null_engine import NOOP, NullEngine

# So few that requests are preempted.
NUM_BLOCKS = 60
# Enough for all, where two steps in flight and preemption never end: all requests are
# preempted in each schedule().
ENOUGH_BLOCKS = {"0.28.0": 600}
# A tenth of it would do.
MOST_STEPS = 5_000
ENGINE = (step_records, scheduler_module, core_module)
WORKER = (
    step_records,
    gpu_worker,
    kv_connector_model_runner_mixin,
    v2_kv_connector,
)


def config(name: str) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "recorder_connectors",
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
def recording(folder: Path) -> Iterator[None]:
    """This process records into `folder` what engines made meanwhile do."""
    engine = step_records.EngineStepRecorder(str(folder))
    worker = step_records.WorkerStepRecorder(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        for module in ENGINE:
            patch.setattr(module, "ENGINE_STEPS", engine)
        for module in WORKER:
            patch.setattr(module, "WORKER_STEPS", worker)
        yield
        worker._append()
        for recorder in (engine, worker):
            recorder._file.flush()


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


def new_engine(
    kv_transfer: dict[str, Any] | None, model: Path, num_blocks: int = NUM_BLOCKS
) -> NullEngine:
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    return NullEngine(model, kv_transfer, num_blocks)


@cache
def run(model: Path, folder: Path, how: str) -> Recorded:
    folder = folder / how
    folder.mkdir()
    num_blocks = NUM_BLOCKS
    with pytest.MonkeyPatch.context() as patch, recording(folder):
        if how == "with_two_steps_in_flight":
            num_blocks = ENOUGH_BLOCKS.get(vllm.__version__, NUM_BLOCKS)
            executor = SimpleNamespace(get_class=lambda _: Overlapping)
            patch.setattr(null_engine, "Executor", executor)
        LOG.clear()
        SAVED.clear()
        engine = new_engine(CONFIGS[how], model, num_blocks)
        if how == "in_the_v2_runners_path":
            patch.setattr(
                kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin,
                "_get_kv_connector_output",
                staticmethod(connector_output(engine.core.vllm_config)),
            )
        _note_steps(engine)
        _serve(engine)
    engine_file = read_lines(folder / "engine_step.jsonl", EngineHeader, EngineStep)
    worker_file = read_lines(folder / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
    return Recorded(
        engine_file.header,
        worker_file.header,
        {
            "SCHEDULER": {step.step_id: step for step in engine_file.records},
            "WORKER": {step.step_id: step for step in worker_file.records},
        },
        {"SCHEDULER": _of_scheduler(), "WORKER": _of_worker()},
        _scheduled_early(),
        set(SAVED),
    )


def _note_steps(engine: NullEngine) -> None:
    """Where steps begin and end, among the calls of the connector."""
    scheduler, executor = engine.core.scheduler, engine.core.model_executor
    schedule, update = scheduler.schedule, scheduler.update_from_output
    execute = executor.execute_model

    def noted_schedule(*told):
        output = schedule(*told)
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


def _serve(engine: NullEngine) -> None:
    """Arrivals, cached prefixes, aborts and preemptions."""
    chance = random.Random(5)
    prompts = [[n + 1] * chance.randrange(1, 200) for n in range(12)]
    for _ in range(30):
        request = engine.add(chance.choice(prompts), chance.randrange(1, 60))
        for _ in range(chance.randrange(6)):
            if engine.core.scheduler.has_requests():
                engine.core.step_fn()
        if chance.random() < 0.1:
            engine.core.abort_requests([request])
    for _ in range(MOST_STEPS):
        if not (engine.core.scheduler.has_requests() or engine.core.batch_queue):
            return
        engine.core.step_fn()
    raise AssertionError(f"not at an end after {MOST_STEPS} steps")


def _of_scheduler() -> dict[int, list[Call]]:
    """A call counts for the step whose schedule() or update ends next."""
    found, calls = defaultdict(list), []
    for entry in LOG:
        if isinstance(entry, Call):
            calls += [entry] if entry.side == "SCHEDULER" else []
        elif entry[0] in ("scheduled", "updated"):
            found[entry[1]] += calls
            calls = []
    return found


def _of_worker() -> dict[int, list[Call]]:
    """A call counts for the step that the worker began last."""
    found, step_id = defaultdict(list), None
    for entry in LOG:
        if not isinstance(entry, Call):
            step_id = entry[1] if entry[0] == "executes" else step_id
        elif entry.side == "WORKER":
            found[step_id].append(entry)
    return found


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
