# SPDX-License-Identifier: Apache-2.0
"""One process with vLLM's engine core on the null model, whose recorder is switched.

Run by benchmarks.hooks. Listens on a Unix socket and answers requests until the parent
goes away.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NOOP

OFF = "off"
# Steps in a row with one setting, and those before them that are not measured: the code
# of another setting was in the caches.
CHUNK_STEPS, WARM_UP_STEPS = 32, 8
CALLS = 1_000

Times = dict[str, list[float]]


class Recorder:
    """The recorder of this process's engine, switched between two steps."""

    def __init__(self, engine: NullEngine) -> None:
        core = engine.core
        self._engine = core._kvtax_recorder
        self._wrapper = core.model_executor.driver_worker
        self._worker = self._wrapper._kvtax_recorder
        # What vLLM would call without the recorder.
        method = type(self._wrapper).execute_model.__wrapped__
        self._execute_model = MethodType(method, self._wrapper)

    def switch(self, setting: str) -> None:
        """Record one step in `setting`, or none."""
        self._engine.detach()
        self._worker.begin_step(None)
        if setting == OFF:
            self._wrapper.execute_model = self._execute_model
        else:
            vars(self._wrapper).pop("execute_model", None)
            self._engine.draw_anew(int(setting))
            self._engine.attach()


def time_decode(
    engine: NullEngine, batch: int, rounds: int, settings: list[str]
) -> Times:
    """Return CPU time in us per decode-only step by setting, a value per round."""
    steps = rounds * len(settings) * (WARM_UP_STEPS + CHUNK_STEPS)
    ids = engine.decode_batch(batch, steps + 1)

    def run(steps: int) -> None:
        step = engine.core.step
        for _ in range(steps):
            step()

    times = _time_in_turns(engine, run, rounds, settings)
    engine.end_batch(ids)
    return times


def time_starts(
    engine: NullEngine, batch: int, rounds: int, settings: list[str]
) -> Times:
    """Return CPU time in us per step in which a request starts and another ends."""

    def run(steps: int) -> None:
        engine.time_starts(steps, batch)

    run(2 * batch)
    times = _time_in_turns(engine, run, rounds, settings)
    engine.run_to_end()
    return times


def _time_in_turns(
    engine: NullEngine, run: Callable[[int], None], rounds: int, settings: list[str]
) -> Times:
    recorder, order = Recorder(engine), random.Random(0)
    times_us: Times = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in order.sample(settings, len(settings)):
            recorder.switch(setting)
            run(WARM_UP_STEPS)
            began_ns = time.thread_time_ns()
            run(CHUNK_STEPS)
            spent_ns = time.thread_time_ns() - began_ns
            times_us[setting].append(spent_ns / 1e3 / CHUNK_STEPS)
    recorder.switch("1")
    return times_us


def time_calls(engine: NullEngine, loops: int) -> Times:
    """Return us per call of an empty method: bare, timed, as reported, counted."""
    from vllm.kvtax_probe.connector import ConnectorTimer, fill

    class Connector:
        def method(self, argument: Any) -> Any:
            return argument

    class Record:
        connector_self_us: dict[str, float]

    connectors = {name: Connector() for name in ("bare", "timed", "counted")}
    timers = {name: ConnectorTimer() for name in ("timed", "counted")}
    for name, timer in timers.items():
        timer.wrap(connectors[name])
        timer.frequent.add(0)
    timers["counted"].draw(drawn=False)
    times_us: Times = {name: [] for name in (*connectors, "reported")}
    for _ in range(loops):
        for name, connector in connectors.items():
            call = connector.method
            began_ns = time.thread_time_ns()
            for _ in range(CALLS):
                call(None)
            spent_ns = time.thread_time_ns() - began_ns
            times_us[name].append(spent_ns / 1e3 / CALLS)
            if name in timers:
                calls = timers[name].take()
            if name == "timed":
                record = Record()
                fill(record, calls, timers[name].methods, {})
                times_us["reported"].append(record.connector_self_us["method"] / CALLS)
    return times_us


def main() -> None:
    """Serve the benchmark."""
    model, socket = sys.argv[1:]
    engine = NullEngine(Path(model), NOOP)
    serve(engine, socket, time_decode, time_starts, time_calls)


if __name__ == "__main__":
    main()
