# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Per-step timing records: one JSONL file per process, one line per engine step.

With KVTAX_STEP_RECORDS_DIR set to a directory, ENGINE_STEPS and WORKER_STEPS are
this process's recorders. Otherwise they are None, so that a hook costs one check
for None. Times are CLOCK_MONOTONIC, comparable between processes.
"""

import json
import os
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)

FLUSH_INTERVAL_S = 0.25
# Steps scheduled but not updated yet: 1, or the depth of the batch queue.
MAX_OPEN_STEPS = 64

now_ns = time.perf_counter_ns


class EngineStep(msgspec.Struct, omit_defaults=True, gc=False):
    """One engine step; a field that was not measured is left out of the line."""

    step_id: int
    t_ns: int
    schedule_us: float | None = None
    build_meta_us: float | None = None
    step_us: float | None = None
    running: int | None = None
    waiting: int | None = None
    scheduled: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    cache_size: int | None = None
    free_blocks: int | None = None
    preemptions: int | None = None
    update_us: float | None = None
    schedule_cpu_us: float | None = None
    update_cpu_us: float | None = None
    thread_cpu_us: float | None = None
    cpu_us: float | None = None
    run_delay_us: float | None = None
    loop_us: float | None = None
    connector_calls: dict[str, int] | None = None
    connector_us: dict[str, float] | None = None
    connector_self_us: dict[str, float] | None = None


class WorkerStep(msgspec.Struct, omit_defaults=True, gc=False):
    """One worker step, joined with its EngineStep by step_id."""

    step_id: int
    t_ns: int
    execute_model_us: float | None = None
    bind_us: float | None = None
    start_load_kv_us: float | None = None
    wait_for_save_us: float | None = None
    get_finished_us: float | None = None
    thread_cpu_us: float | None = None
    cpu_us: float | None = None
    connector_calls: dict[str, int] | None = None
    connector_us: dict[str, float] | None = None
    connector_self_us: dict[str, float] | None = None


class RecordFile:
    """Appends records to a JSONL file in whole lines, from a background thread.

    If the file cannot be created or written, that is logged once and records are
    dropped from then on: the engine keeps serving.
    """

    def __init__(self, directory: str, name: str, header: dict):
        self.path = Path(directory) / f"{name}.jsonl"
        self._pending: deque[msgspec.Struct] = deque()
        self.append = self._pending.append
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._stopped = False
        try:
            first_line = self._encoder.encode(
                {
                    "schema": f"kvtax.{name.partition('.')[0]}/1",
                    "clock": "CLOCK_MONOTONIC",
                    "units": {"t_ns": "ns", "*_us": "us"},
                    "vllm_version": vllm_version,
                    "pid": os.getpid(),
                    "label": json.loads(
                        os.environ.get("KVTAX_STEP_RECORDS_LABEL", "{}")
                    ),
                    **header,
                }
            )
            # "x": records of another engine are never appended to or overwritten.
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115
            self._write(first_line + b"\n")
        except (OSError, ValueError):
            self._stop()
            return
        threading.Thread(target=self._run, name="step-records", daemon=True).start()
        # Unlike atexit, this also runs in the children of multiprocessing.
        Finalize(self, self.flush, exitpriority=10)

    def flush(self) -> None:
        with self._lock:
            records = [self._pending.popleft() for _ in range(len(self._pending))]
            if self._stopped or not records:
                return
            try:
                self._write(self._encoder.encode_lines(records))
            except OSError:
                self._stop()

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(FLUSH_INTERVAL_S)
            self.flush()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _stop(self) -> None:
        logger.exception("Cannot write %s: no step records from here on", self.path)
        # The flag as well: a record appended meanwhile must not follow a torn line.
        self._stopped = True
        self.append = lambda record: None


class EngineStepRecorder:
    """Called by the scheduler and the engine core, in the engine's one thread.

    A hook that only takes the time does so in place, on the public fields: a Python
    call would cost more than the clock. Times that are 0 were not taken.
    """

    __slots__ = (
        "_directory",
        "_file",
        "_next_step_id",
        "_open",
        "began_ns",
        "build_meta_ns",
        "schedule_began_ns",
        "update_ns",
    )

    def __init__(self, directory: str):
        self._directory = directory
        self._file: RecordFile | None = None
        self._next_step_id = 0
        self._open: dict[int, EngineStep] = {}
        self.schedule_began_ns = self.began_ns = self.build_meta_ns = self.update_ns = 0

    def end_schedule(
        self, scheduler: "Scheduler", scheduler_output: "SchedulerOutput"
    ) -> None:
        ended_ns = now_ns()
        began_ns = self.schedule_began_ns
        scheduled = scheduler_output.num_scheduled_tokens
        tokens = scheduler_output.total_num_scheduled_tokens
        # A running request's last prompt chunk of one token counts as a decode: it
        # costs the same and yields a token. That keeps the common step free of a loop.
        prefill_tokens = 0
        if scheduler_output.scheduled_new_reqs or tokens != len(scheduled):
            prefill_tokens = _prefill_tokens(scheduler, scheduled)
        step = self._begin_step(scheduler_output, began_ns)
        step.schedule_us = (ended_ns - began_ns) / 1e3
        if self.build_meta_ns:
            step.build_meta_us = self.build_meta_ns / 1e3
            self.build_meta_ns = 0
        step.running = len(scheduler.running)
        step.waiting = len(scheduler.waiting)
        step.scheduled = len(scheduled)
        step.prefill_tokens = prefill_tokens
        step.decode_tokens = tokens - prefill_tokens

    def note_block_pool(
        self, scheduler: "Scheduler", scheduler_output: "SchedulerOutput"
    ) -> None:
        step = self._open.get(getattr(scheduler_output, "step_id", None))
        if step is None:
            # Only step_timing_v2 is applied.
            step = self._begin_step(scheduler_output, now_ns())
        block_pool = scheduler.kv_cache_manager.block_pool
        step.cache_size = len(block_pool.cached_block_hash_to_block)
        step.free_blocks = block_pool.free_block_queue.num_free_blocks
        step.preemptions = len(scheduler_output.preempted_req_ids or ())

    def end_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Both patches call this; the first call of a step ends it."""
        step = self._open.pop(getattr(scheduler_output, "step_id", None), None)
        if step is None:
            return
        if step.schedule_us is not None:
            step.step_us = (now_ns() - step.t_ns) / 1e3
        if self.update_ns:
            step.update_us = self.update_ns / 1e3
            self.update_ns = 0
        self._append(step)

    def _begin_step(self, scheduler_output: "SchedulerOutput", t_ns: int) -> EngineStep:
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        scheduler_output.step_id = step_id
        step = self._open[step_id] = EngineStep(step_id, t_ns)
        if len(self._open) > MAX_OPEN_STEPS:
            # Scheduled, but never updated (a scheduler driven without its engine).
            self._append(self._open.pop(next(iter(self._open))))
        return step

    def _append(self, step: EngineStep) -> None:
        if self._file is None:
            self._file = RecordFile(self._directory, "engine_step", {})
        self._file.append(step)


class WorkerStepRecorder:
    """Called by one worker, in the thread that executes its model.

    Hooks add to the public fields in place; a method may run twice per step. Times
    that are 0 were not taken.
    """

    __slots__ = (
        "_directory",
        "_file",
        "_step_id",
        "_t_ns",
        "began_ns",
        "bind_ns",
        "execute_model_ns",
        "get_finished_ns",
        "start_load_kv_ns",
        "wait_for_save_ns",
    )

    def __init__(self, directory: str):
        self._directory = directory
        self._file: RecordFile | None = None
        self._step_id: int | None = None
        self._t_ns = self.began_ns = self.bind_ns = self.execute_model_ns = 0
        self.get_finished_ns = self.start_load_kv_ns = self.wait_for_save_ns = 0

    def begin_step(self, rank: int, scheduler_output: "SchedulerOutput") -> None:
        if self._file is None:
            name = f"worker_step.r{rank}"
            self._file = RecordFile(self._directory, name, {"rank": rank})
            # The last step has no next one: appended at exit, before the last flush.
            Finalize(None, self._append, exitpriority=20)
        # The V2 model runner finishes a step in sample_tokens(), so only the next
        # step tells that this one is complete.
        self._append()
        self._step_id = getattr(scheduler_output, "step_id", None)
        self.bind_ns = self.execute_model_ns = 0
        self.get_finished_ns = self.start_load_kv_ns = self.wait_for_save_ns = 0
        self._t_ns = now_ns()

    def end_execute_model(self) -> None:
        self.execute_model_ns = now_ns() - self._t_ns

    def _append(self) -> None:
        if self._step_id is not None:
            self._file.append(
                WorkerStep(
                    self._step_id,
                    self._t_ns,
                    _us(self.execute_model_ns),
                    _us(self.bind_ns),
                    _us(self.start_load_kv_ns),
                    _us(self.wait_for_save_ns),
                    _us(self.get_finished_ns),
                )
            )


def _us(time_ns: int) -> float | None:
    return time_ns / 1e3 if time_ns else None


def _prefill_tokens(scheduler: "Scheduler", scheduled: dict[str, int]) -> int:
    """Tokens of this step that belong to prompts."""
    requests = scheduler.requests
    return sum(
        num_tokens
        for req_id, num_tokens in scheduled.items()
        # schedule() has advanced num_computed_tokens past this step already.
        if requests[req_id].num_computed_tokens - num_tokens
        < requests[req_id].num_prompt_tokens
    )


_directory = os.environ.get("KVTAX_STEP_RECORDS_DIR")
ENGINE_STEPS = EngineStepRecorder(_directory) if _directory else None
WORKER_STEPS = WorkerStepRecorder(_directory) if _directory else None
