# SPDX-License-Identifier: Apache-2.0
"""One record per step of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from .connector import Calls, fill, timer_of, wrapper_cost
from .draw import Draw
from .files import RecordFile, at_exit
from .settings import CPU_EVERY, STEPS_EVERY

now_ns = time.perf_counter_ns
get_ident = threading.get_ident

# Fields of the connector's methods. From vLLM 0.30 on the runner calls
# get_transfer_results in the place of get_finished, which that may call in turn.
FIELDS = {
    "bind_connector_metadata": "bind_us",
    "start_load_kv": "start_load_kv_us",
    "wait_for_save": "wait_for_save_us",
    "get_finished": "get_finished_us",
}


class WorkerStep(msgspec.Struct, omit_defaults=True, gc=False):
    """One worker step, joined with its engine step by step_id."""

    step_id: int
    t_ns: int
    execute_model_us: float | None = None
    bind_us: float | None = None
    start_load_kv_us: float | None = None
    wait_for_save_us: float | None = None
    get_finished_us: float | None = None
    connector_calls: dict[str, int] | None = None
    connector_us: dict[str, float] | None = None
    connector_self_us: dict[str, float] | None = None


# A step: its id, when execute_model() began and ended in ns, and the connector's calls.
Executed = tuple[int, int, int, Calls]


class WorkerRecorder:
    """Recorder of one worker's steps, in the thread that executes its model."""

    __slots__ = (
        "_append",
        "_began_ns",
        "_draw",
        "_fields",
        "_file",
        "_life",
        "_rank",
        "_stage",
        "_step_id",
        "_steps",
        "_timer",
        "ended_ns",
        "is_idle",
    )

    def __init__(self, worker: Any):
        self._rank = getattr(worker.worker, "rank", worker.rpc_rank)
        self._stage = _stage(worker.worker, self._rank)
        self._timer = timer_of("WORKER")
        self._fields = dict(FIELDS)
        if "get_transfer_results" in self._timer.methods:
            self._fields["get_transfer_results"] = self._fields.pop("get_finished")
        # Steps since methods are known to be called often, and those drawn of them.
        self._steps, self._draw = 0, Draw(CPU_EVERY)
        self._file: RecordFile | None = None
        # That of the file, from the first step on.
        self._append: Callable[[Executed], None]
        self._life = ""
        self._step_id: int | None = None
        self._began_ns = 0
        # True while no step is recorded: then only outputs with a life begin one.
        self.is_idle = False
        # The end of execute_model(), which its caller sets; 0 until then.
        self.ended_ns = 0
        at_exit(self.close)

    def begin_step(self, scheduler_output: Any) -> None:
        """End the step before and begin one; none if there is no output."""
        # The V2 model runner finishes a step in sample_tokens(), so only the next step
        # tells that this one is complete.
        timer, step_id = self._timer, self._step_id
        if timer.on:
            calls = timer.take() if timer.calls or timer.frequent else ()
            if step_id is not None:
                self._append((step_id, self._began_ns, self.ended_ns, calls))
                self._step_id = None
        life = getattr(scheduler_output, "records_life", None)
        if life is None:
            if timer.on:
                timer.turn_off()
            # Not one of Ray's tuples, which are looked into.
            self.is_idle = scheduler_output is not None
            return
        self.is_idle = False
        if life != self._life:
            self._begin_file(life)
        if timer.thread != (thread := get_ident()):
            timer.work_in(thread)
        if not timer.on:
            timer.turn_on()
        if timer.frequent:
            number, self._steps = self._steps, self._steps + 1
            timer.draw(number == self._draw.next)
            if timer.drawn:
                self._draw.go_on()
        self._step_id = scheduler_output.step_id
        self.ended_ns = 0
        self._began_ns = now_ns()

    def give_up(self) -> None:
        """Record nothing from here on: the worker must serve all the same."""
        self._step_id, self._file = None, None
        self._timer.stop()

    def close(self) -> None:
        """Write what is left; the last step has no next one."""
        self.begin_step(None)
        if self._file is not None:
            self._file.flush()

    def _begin_file(self, life: str) -> None:
        self._life = life
        name = f"worker_step.r{self._rank}"
        schema = "kvtax.worker_step/1"
        self._file = RecordFile(life, name, schema, self._header, self._finished)
        self._append = self._file.append

    def _header(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "stage": self._stage,
            "every": STEPS_EVERY,
            **self._timer.header(),
        }

    def _finished(self, step: Executed) -> WorkerStep:
        """Make a record, away from the worker's thread."""
        step_id, began_ns, ended_ns, calls = step
        took_us = None
        if ended_ns:
            wrappers_ns = wrapper_cost().of(calls, began_ns, ended_ns)
            took_us = (ended_ns - began_ns - wrappers_ns) / 1e3
        record = WorkerStep(step_id, began_ns, took_us)
        if calls:
            fill(record, calls, self._timer.methods, self._fields)
        return record


def _stage(worker: Any, rank: int) -> int | None:
    """Return the worker's stage of the pipeline; its ranks follow one another."""
    config = getattr(worker, "parallel_config", None)
    stages = getattr(config, "pipeline_parallel_size", None)
    ranks = getattr(config, "world_size", None)
    if not stages or not ranks:
        return None
    return int(rank % ranks // (ranks // stages))
