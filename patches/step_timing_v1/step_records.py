# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Per-step timing records: one JSONL file per process, one line per engine step.

With KVTAX_STEP_RECORDS_DIR set to a directory, ENGINE_STEPS and WORKER_STEPS are
this process's recorders. Otherwise they are None, so that a hook costs one check
for None. Times are CLOCK_MONOTONIC, comparable between processes. With
KVTAX_STEP_RECORDS_EVERY set to N, each N-th step is recorded.
"""

import os
import threading
import time
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import msgspec
from vllm.v1.step_connector import ConnectorCalls
from vllm.v1.step_record_file import RecordFile, number_in_environment
from vllm.v1.step_threads import ThreadsFile, thread_ids

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

# Steps scheduled but not updated yet: 1, or the depth of the batch queue.
MAX_OPEN_STEPS = 64
EVERY = max(round(number_in_environment("KVTAX_STEP_RECORDS_EVERY", 1)), 1)

now_ns = time.perf_counter_ns
thread_cpu_ns = time.thread_time_ns


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
    connector_calls: dict[str, int] | None = None
    connector_us: dict[str, float] | None = None
    connector_self_us: dict[str, float] | None = None


class EngineStepRecorder:
    """Called by the scheduler and the engine core, in the engine's one thread.

    A hook that only takes the time does so in place, on the public fields: a Python
    call would cost more than the clock. Times that are 0 were not taken.
    """

    __slots__ = (
        "_aside_ns",
        "_directory",
        "_file",
        "_next_step_id",
        "_of_executor",
        "_open",
        "_thread_cpu_ns",
        "_update_began_cpu_ns",
        "_update_cpu_ns",
        "_update_ns",
        "began_ns",
        "build_meta_ns",
        "calls",
        "schedule_began_cpu_ns",
        "schedule_began_ns",
    )

    def __init__(self, directory: str):
        self._directory = directory
        self._file: RecordFile | None = None
        self._of_executor: set[int] = set()
        self._next_step_id = 0
        # With _aside_ns as it was when the step began.
        self._open: dict[int, tuple[EngineStep, int]] = {}
        # Time spent after steps had ended, which is no other open step's.
        self._aside_ns = 0
        self.schedule_began_ns = self.began_ns = self.build_meta_ns = 0
        self.schedule_began_cpu_ns = self._thread_cpu_ns = 0
        self._update_began_cpu_ns = self._update_cpu_ns = self._update_ns = 0
        self.calls = ConnectorCalls()

    def note_executor(self) -> None:
        """The model executor was made, and the connector not yet."""
        self._of_executor = thread_ids()

    def begin_schedule(self) -> None:
        # Reading the CPU clock takes longer than any other clock: not in schedule_us.
        self.schedule_began_cpu_ns = thread_cpu_ns()
        self.schedule_began_ns = now_ns()

    def end_schedule(
        self, scheduler: "Scheduler", scheduler_output: "SchedulerOutput"
    ) -> None:
        ended_ns = now_ns()
        began_ns = self.schedule_began_ns
        cpu_us = self._schedule_cpu_us()
        scheduled = scheduler_output.num_scheduled_tokens
        tokens = scheduler_output.total_num_scheduled_tokens
        # A running request's last prompt chunk of one token counts as a decode: it
        # costs the same and yields a token. That keeps the common step free of a loop.
        prefill_tokens = 0
        if scheduler_output.scheduled_new_reqs or tokens != len(scheduled):
            prefill_tokens = _prefill_tokens(scheduler, scheduled)
        step = self._begin_step(scheduler_output, began_ns)
        step.schedule_us = (ended_ns - began_ns) / 1e3
        step.schedule_cpu_us = cpu_us
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
        step, _ = self._open.get(getattr(scheduler_output, "step_id", None), (None, 0))
        if step is None:
            # Only step_timing_v2 is applied.
            cpu_us = self._schedule_cpu_us()
            step = self._begin_step(scheduler_output, now_ns())
            step.schedule_cpu_us = cpu_us
        block_pool = scheduler.kv_cache_manager.block_pool
        step.cache_size = len(block_pool.cached_block_hash_to_block)
        step.free_blocks = block_pool.free_block_queue.num_free_blocks
        step.preemptions = len(scheduler_output.preempted_req_ids or ())
        self.calls.move_to(step)
        self.calls.thread = threading.get_ident()

    def begin_update(self) -> None:
        self._update_began_cpu_ns = thread_cpu_ns()
        self.began_ns = now_ns()

    def end_update(self) -> None:
        self._update_ns = now_ns() - self.began_ns
        self._update_cpu_ns = thread_cpu_ns() - self._update_began_cpu_ns

    def end_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Both patches call this; the first call of a step ends it."""
        ended_ns = now_ns()
        step, aside_ns = self._open.pop(
            getattr(scheduler_output, "step_id", None), (None, 0)
        )
        if step is None:
            return
        if step.schedule_us is not None:
            aside_ns = self._aside_ns - aside_ns
            step.step_us = (ended_ns - step.t_ns - aside_ns) / 1e3
        if step.cache_size is not None:
            self._end_step_of_v2(step)
        self._append(step)
        self._aside_ns += now_ns() - ended_ns

    def _end_step_of_v2(self, step: EngineStep) -> None:
        if self._update_ns:
            step.update_us = self._update_ns / 1e3
            step.update_cpu_us = self._update_cpu_ns / 1e3
            self._update_ns = 0
        self.calls.move_to(step)
        last_ns, self._thread_cpu_ns = self._thread_cpu_ns, thread_cpu_ns()
        if last_ns:
            step.thread_cpu_us = (self._thread_cpu_ns - last_ns) / 1e3

    def _schedule_cpu_us(self) -> float | None:
        """Since begin_schedule(), which only step_timing_v2 calls."""
        if not self.schedule_began_cpu_ns:
            return None
        return (thread_cpu_ns() - self.schedule_began_cpu_ns) / 1e3

    def _begin_step(self, scheduler_output: "SchedulerOutput", t_ns: int) -> EngineStep:
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        scheduler_output.step_id = step_id
        step = EngineStep(step_id, t_ns)
        self._open[step_id] = step, self._aside_ns
        if len(self._open) > MAX_OPEN_STEPS:
            # Scheduled, but never updated (a scheduler driven without its engine).
            self._append(self._open.pop(next(iter(self._open)))[0])
        return step

    def _append(self, step: EngineStep) -> None:
        if step.step_id % EVERY:
            return
        if self._file is None:
            self._open_files(step)
        self._file.append(step)

    def _open_files(self, step: EngineStep) -> None:
        header = {"methods": self.calls.methods, "every": EVERY}
        self._file = RecordFile(self._directory, "engine_step", header)
        if step.cache_size is not None and not self._file.stopped:
            ThreadsFile(self._directory, self._last_step_id, self._of_executor)

    def _last_step_id(self) -> int:
        return self._next_step_id - 1


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
        "calls",
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
        self.calls = ConnectorCalls()

    def begin_step(self, rank: int, scheduler_output: "SchedulerOutput") -> None:
        if self._file is None:
            name = f"worker_step.r{rank}"
            header = {"rank": rank, "methods": self.calls.methods, "every": EVERY}
            self._file = RecordFile(self._directory, name, header)
            # The last step has no next one: appended at exit, before the last flush.
            Finalize(None, self._append, exitpriority=20)
        # The V2 model runner finishes a step in sample_tokens(), so only the next
        # step tells that this one is complete.
        self._append()
        self._step_id = getattr(scheduler_output, "step_id", None)
        self.calls.thread = threading.get_ident()
        self.bind_ns = self.execute_model_ns = 0
        self.get_finished_ns = self.start_load_kv_ns = self.wait_for_save_ns = 0
        self._t_ns = now_ns()

    def end_execute_model(self) -> None:
        self.execute_model_ns = now_ns() - self._t_ns

    def _append(self) -> None:
        step = WorkerStep(
            self._step_id,
            self._t_ns,
            _us(self.execute_model_ns),
            _us(self.bind_ns),
            _us(self.start_load_kv_ns),
            _us(self.wait_for_save_ns),
            _us(self.get_finished_ns),
        )
        self.calls.move_to(step)
        if self._step_id is not None and self._step_id % EVERY == 0:
            self._file.append(step)


def timed(
    connector: "KVConnectorBase", role: "KVConnectorRole", child: int | None = None
) -> "KVConnectorBase":
    """The connector, a MultiConnector's `child` of that number; timed if recording."""
    if ENGINE_STEPS is not None:
        recorder = ENGINE_STEPS if role.name == "SCHEDULER" else WORKER_STEPS
        prefix = "" if child is None else f"{type(connector).__name__}[{child}]."
        recorder.calls.wrap(connector, prefix)
    return connector


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
