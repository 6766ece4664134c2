# SPDX-License-Identifier: Apache-2.0
"""One record per step of an engine core."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import msgspec

from .connector import Calls, fill, timer_of
from .draw import Draw
from .files import RecordFile, at_exit, new_life
from .requests import RequestRecorder
from .settings import CPU_EVERY, STEPS_EVERY
from .threads import ThreadsFile, threads_of_executor

logger = logging.getLogger("vllm.kvtax_probe")

# Steps scheduled but not updated yet: 1, or the depth of the batch queue.
MAX_OPEN_STEPS = 64
# Fields of the connector's methods.
FIELDS = {"build_connector_meta": "build_meta_us"}

now_ns = time.perf_counter_ns
thread_cpu_ns = time.thread_time_ns


class EngineStep(msgspec.Struct, omit_defaults=True, gc=False):
    """One engine step; a field that was not measured is left out of the line."""

    step_id: int
    t_ns: int
    schedule_us: float
    build_meta_us: float | None = None
    step_us: float | None = None
    update_us: float | None = None
    running: int | None = None
    waiting: int | None = None
    scheduled: int | None = None
    prefill_tokens: int | None = None
    decode_tokens: int | None = None
    cache_size: int | None = None
    free_blocks: int | None = None
    preemptions: int = 0
    schedule_cpu_us: float | None = None
    update_cpu_us: float | None = None
    thread_cpu_us: float | None = None
    connector_calls: dict[str, int] | None = None
    connector_us: dict[str, float] | None = None
    connector_self_us: dict[str, float] | None = None


# A step that is scheduled and whose output is not there yet: its record, the calls of
# its schedule(), and the time spent aside until then in ns.
OpenStep = tuple[EngineStep, list[Calls], int]


class EngineRecorder:
    """Recorder of one engine core's steps, in the engine's one thread.

    Its scheduler's `schedule` and `update_from_output` are wrapped on the instance, so
    the scheduler may be of any class.
    """

    def __init__(self, engine_core: Any):
        parallel = engine_core.vllm_config.parallel_config
        self._dp_rank = getattr(parallel, "data_parallel_rank", 0)
        self.life = new_life(self._dp_rank)
        self._timer = timer_of("SCHEDULER")
        self._timer.thread = threading.get_ident()
        self._scheduler = scheduler = engine_core.scheduler
        self._has_queues = _has_queues(scheduler)
        self._block_pool = _block_pool(scheduler)
        self._threads_before = threads_of_executor()
        self._file: RecordFile | None = None
        self._threads: ThreadsFile | None = None
        self.next_step_id = 0
        self._open: dict[int, OpenStep] = {}
        self._drawn_to_record, self._drawn_for_cpu = Draw(STEPS_EVERY), Draw(CPU_EVERY)
        # Time spent after steps had ended, which is no other open step's.
        self._aside_ns = 0
        # The thread's CPU clock when it was read last, and the step that ended then.
        self._thread_cpu_ns, self._thread_cpu_step = 0, -2
        self._cpu_read_after: set[int] = set()
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._requests = RequestRecorder(self.life, scheduler)
        self.attach()
        at_exit(self.close)

    def attach(self) -> None:
        """Record the steps from here on."""
        self._scheduler.schedule = self._timed_schedule
        self._scheduler.update_from_output = self._timed_update
        self._requests.detached = False

    def detach(self) -> None:
        """Leave the scheduler as it was."""
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update
        self._requests.detached = True

    def close(self) -> None:
        """Write what is left."""
        self._requests.close()
        for file in (self._file, self._threads):
            if file is not None:
                file.flush()

    def _timed_schedule(self, *args: Any, **kwargs: Any) -> Any:
        step_id, drawn = self.next_step_id, self._drawn_for_cpu
        # A call less in most steps.
        with_cpu = step_id >= drawn.next and drawn.is_chosen(step_id)
        if self._timer.drawn is not with_cpu:
            self._timer.draw(with_cpu)
        # Reading the CPU clock takes longer than any other: not in schedule_us.
        cpu_ns = thread_cpu_ns() if with_cpu else 0
        began_ns = now_ns()
        output = self._schedule(*args, **kwargs)
        took_ns = now_ns() - began_ns
        if with_cpu:
            cpu_ns = thread_cpu_ns() - cpu_ns
        try:
            self._note_scheduled(output, began_ns, took_ns, cpu_ns)
        except Exception:
            self._give_up()
        return output

    def _note_scheduled(
        self, output: Any, began_ns: int, took_ns: int, cpu_ns: int
    ) -> None:
        step_id = output.step_id = self.next_step_id
        self.next_step_id = step_id + 1
        if 0 <= self._drawn_for_cpu.next - step_id <= 1:
            self._cpu_read_after.add(step_id)
        if self._requests.with_external_kv:
            self._requests.note_scheduled()
        calls = self._timer.take()
        if STEPS_EVERY > 1 and not self._drawn_to_record.is_chosen(step_id):
            return
        output.records_life = self.life
        scheduler, pool = self._scheduler, self._block_pool
        scheduled = output.num_scheduled_tokens
        tokens, requests = output.total_num_scheduled_tokens, len(scheduled)
        # A running request's last prompt chunk of one token counts as a decode: it
        # costs the same and yields a token. That keeps the common step free of a loop.
        prefill_tokens = 0
        if output.scheduled_new_reqs or tokens != requests:
            prefill_tokens = _prefill_tokens(scheduler, scheduled)
        preempted = output.preempted_req_ids
        record = EngineStep(
            step_id,
            began_ns,
            took_ns / 1e3,
            scheduled=requests,
            prefill_tokens=prefill_tokens,
            decode_tokens=tokens - prefill_tokens,
            preemptions=len(preempted) if preempted else 0,
        )
        if cpu_ns:
            record.schedule_cpu_us = cpu_ns / 1e3
        if self._has_queues:
            record.running = len(scheduler.running)
            record.waiting = len(scheduler.waiting)
        if pool is not None:
            # A reset of the prefix cache makes a new map.
            record.cache_size = len(pool.cached_block_hash_to_block)
            record.free_blocks = pool.free_block_queue.num_free_blocks
        self._open[step_id] = record, calls, self._aside_ns
        if len(self._open) > MAX_OPEN_STEPS:
            # Scheduled, but never updated.
            self._append(self._open.pop(next(iter(self._open))))

    def _timed_update(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step_id = getattr(scheduler_output, "step_id", -1)
        step = self._open.pop(step_id, None)
        try:
            self._requests.begin_update(step_id, scheduler_output, model_runner_output)
        except Exception:
            self._give_up()
        with_cpu = step is not None and step[0].schedule_cpu_us is not None
        cpu_ns = thread_cpu_ns() if with_cpu else 0
        began_ns = now_ns()
        outputs = self._update(scheduler_output, model_runner_output, *args, **kwargs)
        ended_ns = now_ns()
        try:
            self._note_updated(step_id, step, began_ns, ended_ns, cpu_ns)
        except Exception:
            self._give_up()
        return outputs

    def _note_updated(
        self,
        step_id: int,
        step: OpenStep | None,
        began_ns: int,
        ended_ns: int,
        cpu_ns: int,
    ) -> None:
        thread_cpu_us = None
        if step_id in self._cpu_read_after:
            self._cpu_read_after.remove(step_id)
            thread_cpu_us = self._read_thread_cpu(step_id)
        self._requests.end_update()
        timer = self._timer
        calls = timer.take() if timer.calls or timer.frequent else None
        if step is not None:
            record, calls_of_schedule, aside_ns = step
            record.thread_cpu_us = thread_cpu_us
            if cpu_ns:
                record.update_cpu_us = (self._thread_cpu_ns - cpu_ns) / 1e3
            record.update_us = (ended_ns - began_ns) / 1e3
            aside_ns = self._aside_ns - aside_ns
            record.step_us = (ended_ns - record.t_ns - aside_ns) / 1e3
            if calls:
                calls_of_schedule += calls
            self._append(step)
        self._aside_ns += now_ns() - ended_ns

    def _give_up(self) -> None:
        """Detach: the engine must serve all the same."""
        logger.exception("kvtax: no step records from here on")
        self.detach()

    def _read_thread_cpu(self, step_id: int) -> float | None:
        """Read the thread's CPU clock after a step; return the step's CPU time in us.

        None if the clock was not read after the step before.
        """
        before_ns, self._thread_cpu_ns = self._thread_cpu_ns, thread_cpu_ns()
        before_step, self._thread_cpu_step = self._thread_cpu_step, step_id
        if before_step != step_id - 1:
            return None
        return (self._thread_cpu_ns - before_ns) / 1e3

    def _append(self, step: OpenStep) -> None:
        if self._file is None:
            schema = "kvtax.engine_step/1"
            self._file = RecordFile(
                self.life, "engine_step", schema, self._header, self._finished
            )
            if not self._file.stopped:
                self._threads = ThreadsFile(
                    self.life, lambda: self.next_step_id - 1, self._threads_before
                )
        self._file.append(step)

    def _header(self) -> dict[str, Any]:
        return {
            "dp_rank": self._dp_rank,
            "every": STEPS_EVERY,
            "cpu_every": CPU_EVERY,
            "methods": self._timer.methods,
            "not_timed": self._timer.not_timed,
        }

    def _finished(self, step: OpenStep) -> EngineStep:
        """Complete a record, away from the engine's thread."""
        record, calls, _ = step
        fill(record, calls, self._timer.methods, FIELDS)
        return record


def _has_queues(scheduler: Any) -> bool:
    try:
        len(scheduler.running), len(scheduler.waiting)
    except (AttributeError, TypeError):
        return False
    return True


def _block_pool(scheduler: Any) -> Any:
    """Return the scheduler's block pool; None if it has another kind of cache."""
    try:
        pool = scheduler.kv_cache_manager.block_pool
        len(pool.cached_block_hash_to_block), pool.free_block_queue.num_free_blocks
    except (AttributeError, TypeError):
        return None
    return pool


def _prefill_tokens(scheduler: Any, scheduled: dict[str, int]) -> int:
    """Count the tokens of this step that belong to prompts."""
    requests = scheduler.requests
    return sum(
        num_tokens
        for req_id, num_tokens in scheduled.items()
        # schedule() has advanced num_computed_tokens past this step already.
        if requests[req_id].num_computed_tokens - num_tokens
        < requests[req_id].num_prompt_tokens
    )
