# SPDX-License-Identifier: Apache-2.0
"""One process with vLLM's engine core on the null model, stepped on demand.

Run by benchmarks.hooks. It listens on a Unix socket and answers requests for rounds of
decode-only steps until the parent goes away.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NOOP

# Steps before the measured ones of a round: caches and branch predictors are cold
# after another process had the core.
WARM_UP_STEPS = 50
# Steps in a row in one mode, where modes alternate within the process.
CHUNK_STEPS = 10
# Records that are written at once.
RECORDS = 1_000


class Mode(NamedTuple):
    """Parts that are on.

    The worker's recorder alone would record nothing: its step_id is the engine's.
    """

    layers: bool = True
    floor: bool = False
    engine: bool = False
    worker: bool = False
    calls: bool = False


# From "off" on each has what the one before has, and one thing more.
MODES = {
    "no layers": Mode(layers=False),
    "floor": Mode(floor=True),
    "off": Mode(),
    "engine": Mode(engine=True),
    "both": Mode(engine=True, worker=True),
    "calls": Mode(engine=True, worker=True, calls=True),
}


class Switch:
    """Turns parts of the recording of this process on and off, between two steps."""

    def __init__(self, engine: NullEngine) -> None:
        self._engine = engine.core._kvtax_recorder
        self._scheduler = engine.core.scheduler
        self._wrapper = engine.core.model_executor.driver_worker
        self._worker = self._wrapper._kvtax_recorder
        self._model = self._wrapper.worker.model_runner.model
        self._calls = [
            (connector, name, value)
            for connector in (engine.core.scheduler.connector, get_kv_transfer_group())
            for name, value in vars(connector).items()
            if hasattr(value, "__wrapped__")
        ]

    def set(self, mode: Mode) -> None:
        (self._engine.attach if mode.engine else self._engine.detach)()
        if mode.floor:
            time_calls_only(self._scheduler, deque(maxlen=RECORDS))
        self._wrapper._kvtax_recorder = self._worker if mode.worker else None
        if mode.layers:
            vars(self._model).pop("transfer_layers", None)
        else:
            self._model.transfer_layers = lambda: None
        for connector, name, call in self._calls:
            if mode.calls:
                setattr(connector, name, call)
            else:
                vars(connector).pop(name, None)


def time_calls_only(scheduler: Any, records: deque[tuple[int, int]]) -> None:
    """Wrap a scheduler as little as a recorder can: two clocks a call, one append."""
    schedule, update = scheduler.schedule, scheduler.update_from_output
    now_ns = time.perf_counter_ns

    def timed_schedule() -> Any:
        began_ns = now_ns()
        output = schedule()
        output.took_ns = now_ns() - began_ns
        return output

    def timed_update(scheduler_output: Any, model_runner_output: Any) -> Any:
        began_ns = now_ns()
        outputs = update(scheduler_output, model_runner_output)
        records.append((scheduler_output.took_ns, now_ns() - began_ns))
        return outputs

    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


def time_steps(engine: NullEngine, batch: int, steps: int) -> np.ndarray:
    """Time decode-only steps of one batch: (steps,) us."""
    ids = engine.decode_batch(batch, WARM_UP_STEPS + steps)
    engine.time(WARM_UP_STEPS)
    times_us = engine.time(steps)
    engine.end_batch(ids)
    return np.array(times_us)


def time_modes(
    engine: NullEngine, batch: int, steps: int, seed: int
) -> dict[str, np.ndarray]:
    """Time decode-only steps in each of MODES, in turns of CHUNK_STEPS: (steps,) us."""
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
    switch.set(MODES["calls"])
    engine.end_batch(ids)
    return {mode: np.array(values[:steps]) for mode, values in times_us.items()}


def time_starts(
    engine: NullEngine, batch: int, steps: int, seed: int
) -> dict[str, np.ndarray]:
    """Time steps in each of which a request starts, and one ends: (steps,) us by mode.

    After each turn of a mode the requests that began in it have ended.
    """
    order = random.Random(seed)
    times_us: dict[str, list[float]] = {mode: [] for mode in MODES}
    switch = Switch(engine)
    engine.time_starts(WARM_UP_STEPS, batch)
    for _ in range(-(-steps // CHUNK_STEPS)):
        for mode in order.sample(list(MODES), len(MODES)):
            switch.set(MODES[mode])
            engine.time_starts(batch, batch)
            times_us[mode] += engine.time_starts(CHUNK_STEPS, batch)
    switch.set(MODES["calls"])
    engine.run_to_end()
    if not engine.core.scheduler.reset_prefix_cache():
        raise RuntimeError("the prefix cache has blocks of requests that ended")
    return {mode: np.array(values[:steps]) for mode, values in times_us.items()}


def time_writing(engine: NullEngine, loops: int) -> dict[str, np.ndarray]:
    """(loops,) us to write a step's record, and the longest pause meanwhile in us.

    A pause is for how long a thread that only reads the clock did not get to run.
    """
    from vllm.kvtax_probe import files

    recorder = engine.core._kvtax_recorder
    ids = engine.decode_batch(8, 2)
    output = recorder._timed_schedule()
    scheduled_ns = time.perf_counter_ns()
    updated = scheduled_ns, scheduled_ns, 0, None, 0, (), None
    step = recorder._open.pop(output.step_id), updated
    write_us, pause_us = np.empty(loops), np.empty(loops)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "records_directory", lambda: Path(folder))
        # Only this thread writes.
        patch.setattr(files.RecordFile, "_run", lambda self: None)
        schema = "kvtax.engine_step/1"
        file = files.RecordFile("life", "engine_step", schema, shape=recorder._finished)
        for loop in range(loops):
            write_us[loop] = write(file, step) / 1e3 / RECORDS
            with Watch() as watch:
                write(file, step)
            pause_us[loop] = watch.longest_ns / 1e3
    engine.end_batch(ids)
    return {"record": write_us, "pause": pause_us}


def write(file: Any, step: Any) -> int:
    """Write RECORDS copies of a record; return the time that takes in ns."""
    for _ in range(RECORDS):
        file.append(step)
    began_ns = time.perf_counter_ns()
    file.flush()
    return time.perf_counter_ns() - began_ns


class Watch:
    """A thread that notes for how long it could not run; a context."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        last_ns = time.perf_counter_ns()
        while not self._ended:
            now_ns = time.perf_counter_ns()
            self.longest_ns = max(self.longest_ns, now_ns - last_ns)
            last_ns = now_ns


def time_calls(engine: NullEngine, loops: int) -> dict[str, np.ndarray]:
    """(loops,) us per call of a method that does next to nothing, timed and counted."""
    from vllm.kvtax_probe.connector import ConnectorTimer

    class Connector:
        def method(self, argument: Any) -> Any:
            return argument

    bare, timed, counted = Connector(), Connector(), Connector()
    timers = [ConnectorTimer(), ConnectorTimer()]
    timers[0].wrap(timed)
    timers[1].wrap(counted)
    for _ in range(RECORDS):
        counted.method(None)
    timers[1].take()
    timers[1].draw(drawn=False)
    times_us = {}
    connectors = {"call": bare, "timed call": timed, "counted call": counted}
    for name, connector in connectors.items():
        call, times_us[name] = connector.method, np.empty(loops)
        for loop in range(loops):
            start = time.perf_counter_ns()
            for _ in range(RECORDS):
                call(None)
            times_us[name][loop] = (time.perf_counter_ns() - start) / 1e3 / RECORDS
            for timer in timers:
                timer.take()
    return times_us


def main() -> None:
    model, socket = sys.argv[1:]
    engine = NullEngine(Path(model), NOOP)
    serve(engine, socket, time_steps, time_modes, time_starts, time_writing, time_calls)


if __name__ == "__main__":
    main()
