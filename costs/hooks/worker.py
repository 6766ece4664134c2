# SPDX-License-Identifier: Apache-2.0
"""One process with vLLM's engine core on the null model, stepped on demand.

Run by costs.hooks with a private tree first on PYTHONPATH. It listens on a Unix socket
and answers requests for rounds of decode-only steps until the parent goes away.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group

from costs.hooks.patch_hooks import engine_hooks, worker_hooks
from lab.serving.engine_process import serve
from lab.serving.null_engine import NOOP, NullEngine

# Steps before the measured ones of a round: caches and branch predictors are cold
# after another process had the core.
WARM_UP_STEPS = 50
# Steps in a row in one mode, where modes alternate within the process.
CHUNK_STEPS = 10
# Sequences of hook calls timed at once: far shorter than the writer's interval.
LOOP_STEPS = 1_000


class Mode(NamedTuple):
    """What is on. The worker's hooks alone would record nothing, as their step_id comes
    from the engine's."""

    layers: bool = True
    engine: bool = False
    worker: bool = False
    calls: bool = False
    requests: bool = False


# Each has what the one before has, and one thing more.
MODES = {
    "no layers": Mode(layers=False),
    "off": Mode(),
    "engine": Mode(engine=True),
    "both": Mode(engine=True, worker=True),
    "calls": Mode(engine=True, worker=True, calls=True),
    "requests": Mode(engine=True, worker=True, calls=True, requests=True),
}


class Switch:
    """Turns parts of the recording of this process on and off, between two steps."""

    def __init__(self, engine: NullEngine) -> None:
        worker = engine.core.model_executor.driver_worker.worker
        self._model = worker.model_runner.model
        connectors = (engine.core.scheduler.connector, get_kv_transfer_group())
        self._connectors = [
            (connector, dict(_wrappers(connector))) for connector in connectors
        ]

    def set(self, mode: Mode) -> None:
        from vllm.v1 import step_records, step_requests
        from vllm.v1.core.sched import scheduler
        from vllm.v1.engine import core
        from vllm.v1.worker import gpu_worker, kv_connector_model_runner_mixin

        for module in (scheduler, core):
            module.ENGINE_STEPS = step_records.ENGINE_STEPS if mode.engine else None
        for module in (gpu_worker, kv_connector_model_runner_mixin):
            module.WORKER_STEPS = step_records.WORKER_STEPS if mode.worker else None
        scheduler.REQUESTS = step_requests.REQUESTS if mode.requests else None
        if mode.layers:
            vars(self._model).pop("transfer_layers", None)
        else:
            self._model.transfer_layers = lambda: None
        for connector, calls in self._connectors:
            for name, call in calls.items():
                if mode.calls:
                    setattr(connector, name, call)
                else:
                    vars(connector).pop(name, None)


def _wrappers(connector: Any) -> Iterator[tuple[str, Callable]]:
    for name, value in vars(connector).items():
        if hasattr(value, "__wrapped__"):
            yield name, value


def time_steps(engine: NullEngine, batch: int, steps: int) -> np.ndarray:
    """(steps,) us of decode-only steps of one batch."""
    ids = engine.decode_batch(batch, WARM_UP_STEPS + steps)
    engine.time(WARM_UP_STEPS)
    times_us = engine.time(steps)
    engine.end_batch(ids)
    return np.array(times_us)


def time_modes(
    engine: NullEngine, batch: int, steps: int, seed: int
) -> dict[str, np.ndarray]:
    """(steps,) us of decode-only steps in each of MODES, in turns of CHUNK_STEPS."""
    order = random.Random(seed)
    chunks = -(-steps // CHUNK_STEPS)
    total = chunks * CHUNK_STEPS * len(MODES)
    ids = engine.decode_batch(batch, WARM_UP_STEPS + total)
    engine.time(WARM_UP_STEPS)
    times_us: dict[str, list[float]] = {mode: [] for mode in MODES}
    switch = Switch(engine)
    for _ in range(chunks):
        for mode in order.sample(list(MODES), len(MODES)):
            switch.set(MODES[mode])
            times_us[mode] += engine.time(CHUNK_STEPS)
    switch.set(MODES["requests"])
    engine.end_batch(ids)
    return {mode: np.array(values[:steps]) for mode, values in times_us.items()}


def time_hooks(engine: NullEngine, batch: int, loops: int) -> dict[str, np.ndarray]:
    """(loops,) us per step: its hooks in a tight loop, and writing its record."""
    from vllm.v1 import step_records
    from vllm.v1.step_records import now_ns

    package = Path(vllm.__file__).parent
    scheduler = engine.core.scheduler
    ids = engine.decode_batch(batch, WARM_UP_STEPS)
    output = scheduler.schedule()
    times_ns: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        of_engine = step_records.EngineStepRecorder(folder)
        of_worker = step_records.WorkerStepRecorder(folder)
        engine_names = {"ENGINE_STEPS": of_engine, "now_ns": now_ns}
        worker_names = {"WORKER_STEPS": of_worker, "now_ns": now_ns}
        worker = SimpleNamespace(rank=0)
        for name, recorder, hooks, owner in (
            ("engine", of_engine, engine_hooks(package, engine_names), scheduler),
            ("worker", of_worker, worker_hooks(package, worker_names), worker),
        ):
            # The first two open the file and write the first record.
            hooks(owner, output)
            hooks(owner, output)
            for _ in range(loops):
                start = now_ns()
                for _ in range(LOOP_STEPS):
                    hooks(owner, output)
                middle = now_ns()
                recorder._file.flush()
                times_ns.setdefault(name, []).append(middle - start)
                times_ns.setdefault(f"{name} record", []).append(now_ns() - middle)
    engine.end_batch(ids)
    return {name: np.array(ns) / LOOP_STEPS / 1e3 for name, ns in times_ns.items()}


def time_calls(engine: NullEngine, loops: int) -> dict[str, np.ndarray]:
    """(loops,) us per call of a method that does next to nothing, and of it timed."""
    from vllm.v1.step_connector import ConnectorCalls

    class Connector:
        def method(self, argument):
            return argument

    bare, timed = Connector(), Connector()
    ConnectorCalls().wrap(timed)
    times_us = {}
    for name, connector in (("call", bare), ("timed call", timed)):
        call, times_us[name] = connector.method, np.empty(loops)
        for loop in range(loops):
            start = time.perf_counter_ns()
            for _ in range(LOOP_STEPS):
                call(None)
            us = (time.perf_counter_ns() - start) / 1e3
            times_us[name][loop] = us / LOOP_STEPS
    return times_us


def main() -> None:
    model, socket = sys.argv[1:]
    engine = NullEngine(Path(model), NOOP)
    serve(engine, socket, time_steps, time_modes, time_hooks, time_calls)


if __name__ == "__main__":
    main()
