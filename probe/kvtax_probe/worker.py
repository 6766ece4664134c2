# SPDX-License-Identifier: Apache-2.0
"""One record per step of a worker."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from .connector import Calls, fill, timer_of
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


class WorkerRecorder:
    """Recorder of one worker's steps, in the thread that executes its model."""

    def __init__(self, worker: Any):
        self._rank = getattr(worker.worker, "rank", worker.rpc_rank)
        self._timer = timer_of("WORKER")
        self._fields = dict(FIELDS)
        if "get_transfer_results" in self._timer.methods:
            self._fields["get_transfer_results"] = self._fields.pop("get_finished")
        self._draw = Draw(CPU_EVERY)
        self._steps = 0
        self._file: RecordFile | None = None
        self._life = ""
        self._record: WorkerStep | None = None
        at_exit(self.close)

    def begin_step(self, scheduler_output: Any) -> None:
        # The V2 model runner finishes a step in sample_tokens(), so only the next step
        # tells that this one is complete.
        self._append()
        timer, drawn, step = self._timer, self._draw, self._steps
        timer.thread = get_ident()
        self._steps = step + 1
        # A call less in most steps.
        with_frequent = step >= drawn.next and drawn.is_chosen(step)
        if timer.drawn is not with_frequent:
            timer.draw(with_frequent)
        life = getattr(scheduler_output, "records_life", None)
        if life is not None:
            if life != self._life:
                self._begin_file(life)
            self._record = WorkerStep(scheduler_output.step_id, now_ns())

    def end_execute_model(self) -> None:
        if self._record is not None:
            self._record.execute_model_us = (now_ns() - self._record.t_ns) / 1e3

    def close(self) -> None:
        """Write what is left; the last step has no next one."""
        self._append()
        if self._file is not None:
            self._file.flush()

    def _begin_file(self, life: str) -> None:
        self._life = life
        name = f"worker_step.r{self._rank}"
        schema = "kvtax.worker_step/1"
        self._file = RecordFile(life, name, schema, self._header, self._finished)

    def _append(self) -> None:
        timer = self._timer
        calls = timer.take() if timer.calls or timer.frequent else []
        if self._record is not None and self._file is not None:
            self._file.append((self._record, calls))
            self._record = None

    def _header(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "every": STEPS_EVERY,
            "methods": self._timer.methods,
            "not_timed": self._timer.not_timed,
        }

    def _finished(self, step: tuple[WorkerStep, list[Calls]]) -> WorkerStep:
        """Complete a record, away from the worker's thread."""
        record, calls = step
        fill(record, calls, self._timer.methods, self._fields)
        return record
