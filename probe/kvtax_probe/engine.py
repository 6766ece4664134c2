# SPDX-License-Identifier: Apache-2.0
"""One record per step of an engine core."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec

from .connector import fill, timer_of, wrapper_cost
from .draw import Draw
from .files import RecordFile, at_exit, new_life
from .requests import RequestRecorder, put
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


# A step that is scheduled: step_id, when schedule() began and ended, its CPU time,
# requests, tokens, tokens of prompts, preemptions, running, waiting, cache_size,
# free_blocks, time spent aside until then, calls of schedule(). Times are in ns.
Scheduled = tuple[Any, ...]
# A step that is scheduled, and its update: when that began and ended, its CPU time and
# that of the whole step, the time spent aside until then, and the calls of the update.
# A step that was never updated has the first alone.
Updated = tuple[Any, ...]
# No step.
NEVER = -2
# The CPU clock is read after each step that took longer.
LONG_NS = 10_000_000


class EngineRecorder:
    """Recorder of one engine core's steps, in the engine's one thread.

    Its scheduler's `schedule` and `update_from_output` are wrapped on the instance, so
    the scheduler may be of any class. In a step caches are cold, so a step touches as
    little as can be: it appends tuples of integers. A thread makes records of them.
    A step that is not recorded is only counted in schedule(); its update is left alone,
    unless steps overlap or a request waits for a token or for KV.
    """

    __slots__ = (
        "_append",
        "_aside_ns",
        "_block_pool",
        "_cache_of",
        "_clocks",
        "_count_waiting",
        "_cpu_read_after",
        "_dp_rank",
        "_draw_at",
        "_every",
        "_file",
        "_first_step",
        "_gave_up",
        "_is_watching",
        "_next_recorded",
        "_open",
        "_overlaps",
        "_recorded",
        "_requests",
        "_schedule",
        "_scheduler",
        "_thread_cpu_ns",
        "_thread_cpu_step",
        "_threads",
        "_threads_before",
        "_timer",
        "_update",
        "_watched_update",
        "life",
        "next_step_id",
    )

    def __init__(self, engine_core: Any):
        parallel = engine_core.vllm_config.parallel_config
        # Where engines need not step together, vLLM sets the rank of each to 0.
        rank = getattr(parallel, "data_parallel_rank", 0)
        self._dp_rank = getattr(parallel, "data_parallel_index", rank)
        self.life = new_life(self._dp_rank)
        self._timer = timer_of("SCHEDULER")
        self._timer.work_in(threading.get_ident())
        self._scheduler = scheduler = engine_core.scheduler
        self._count_waiting = _count_waiting(scheduler)
        self._block_pool = _block_pool(scheduler)
        self._cache_of = _cache_of(self._block_pool)
        self._threads_before = threads_of_executor()
        self._file: RecordFile | None = None
        self._threads: ThreadsFile | None = None
        self._append: Callable[[Any], None] = self._append_first
        self.next_step_id = 0
        self._gave_up = False
        # Steps scheduled and not updated yet.
        self._open: dict[int, Scheduled] = {}
        # Time spent after steps had ended, while others were open.
        self._aside_ns = 0
        self.draw_anew(STEPS_EVERY)
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._watched_update, self._is_watching = self._timed_update, False
        # Whether vLLM schedules a step before it has updated the one before.
        self._overlaps = getattr(engine_core, "batch_queue", None) is not None
        self._requests = RequestRecorder(self.life, scheduler)
        self.attach()
        at_exit(self.close)

    def draw_anew(self, every: int) -> None:
        """Record one step in `every` from here on, the next step among the first."""
        self._every, self._first_step = every, self.next_step_id
        self._recorded = Draw(every)
        self._next_recorded = self._first_step + self._recorded.next
        # Those of the recorded steps, by their number, that have CPU clocks.
        self._clocks = Draw(max(CPU_EVERY // every, 1))
        # The next step of which it must be decided.
        self._draw_at = self._first_step
        # The thread's CPU clock when it was read last, and the step that ended then.
        self._thread_cpu_ns, self._thread_cpu_step = 0, NEVER
        self._cpu_read_after: set[int] = set()

    def attach(self) -> None:
        """Record the steps from here on."""
        put(self._scheduler, "schedule", self._timed_schedule)
        self._watch_update()
        self._requests.detached = False

    def detach(self) -> None:
        """Leave the scheduler as it was."""
        put(self._scheduler, "schedule", self._schedule)
        self._leave_update()
        self._requests.detached = True
        self._timer.turn_off()

    def close(self) -> None:
        """Write what is left."""
        self._requests.close()
        for file in (self._file, self._threads):
            if file is not None:
                file.flush()

    def _watch_update(self) -> None:
        """Have the scheduler's update come through here, over what others have put."""
        if not self._is_watching:
            self._is_watching = True
            self._update = self._scheduler.update_from_output
            put(self._scheduler, "update_from_output", self._watched_update)

    def _leave_update(self) -> None:
        """Leave the scheduler's update alone, unless others have wrapped it since."""
        if self._scheduler.update_from_output is self._watched_update:
            put(self._scheduler, "update_from_output", self._update)
            self._is_watching = False

    def _timed_schedule(self, *args: Any, **kwargs: Any) -> Any:
        step_id = self.next_step_id
        if step_id != self._next_recorded:
            more = args or kwargs
            output = self._schedule(*args, **kwargs) if more else self._schedule()
            try:
                self.next_step_id = step_id + 1
                if self._open:
                    # The calls are of no step that is recorded.
                    self._timer.take()
                requests = self._requests
                requests.step_id = output.step_id = step_id
                if (
                    output.scheduled_new_reqs
                    or output.preempted_req_ids
                    or output.scheduled_cached_reqs.resumed_req_ids
                    or requests.with_external_kv
                ):
                    requests.note_scheduled(step_id, output)
                if not self._is_watching and (
                    requests.without_token
                    or requests.waiting_for_kv
                    or step_id in self._cpu_read_after
                ):
                    self._watch_update()
            except Exception:
                self._give_up()
            return output
        timer = self._timer
        if not timer.on:
            timer.turn_on()
            self._watch_update()
        # Reading the CPU clock takes longer than any other: not in schedule_us.
        cpu_ns = 0
        if step_id >= self._draw_at and self._draw_clocks(step_id):
            cpu_ns = thread_cpu_ns()
        began_ns = now_ns()
        # A call without * takes half as long.
        more = args or kwargs
        output = self._schedule(*args, **kwargs) if more else self._schedule()
        ended_ns = now_ns()
        try:
            if cpu_ns:
                cpu_ns = thread_cpu_ns() - cpu_ns
            requests = self._requests
            requests.step_id = output.step_id = step_id
            output.records_life = self.life
            self.next_step_id = step_id + 1
            if self._every == 1:
                self._next_recorded = step_id + 1
            calls = timer.take() if timer.calls or timer.frequent else ()
            preempted, begun = output.preempted_req_ids, output.scheduled_new_reqs
            if (
                begun
                or preempted
                or output.scheduled_cached_reqs.resumed_req_ids
                or requests.with_external_kv
            ):
                requests.note_scheduled(step_id, output)
            scheduled = output.num_scheduled_tokens
            tokens = output.total_num_scheduled_tokens
            # A running request's last prompt chunk of one token counts as a decode: it
            # costs the same and yields a token. That keeps the common step free of a
            # loop.
            prefill_tokens = 0
            scheduler = self._scheduler
            if begun or tokens != len(scheduled):
                begun_ids = {*requests.without_token, *[new.req_id for new in begun]}
                prefill_tokens = _prefill_tokens(
                    scheduler.requests, scheduled, tokens, begun_ids
                )
            running = waiting = cache_size = free_blocks = None
            if self._count_waiting is not None:
                running = len(scheduler.running)
                waiting = self._count_waiting(scheduler.waiting)
            pool = self._block_pool
            if pool is not None:
                # A reset of the prefix cache makes a new map.
                cache_size = len(self._cache_of(pool))
                free_blocks = pool.free_block_queue.num_free_blocks
            self._open[step_id] = (
                step_id,
                began_ns,
                ended_ns,
                cpu_ns,
                len(scheduled),
                tokens,
                prefill_tokens,
                len(preempted) if preempted else 0,
                running,
                waiting,
                cache_size,
                free_blocks,
                self._aside_ns,
                calls,
            )
            if len(self._open) > MAX_OPEN_STEPS:
                # Scheduled, but never updated.
                self._append((self._open.pop(next(iter(self._open))),))
        except Exception:
            self._give_up()
        return output

    def _timed_update(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step_id = getattr(scheduler_output, "step_id", NEVER)
        step = self._open.pop(step_id, None)
        requests = self._requests
        requests.step_id = step_id
        try:
            if requests.waiting_for_kv:
                requests.note_received(model_runner_output)
        except Exception:
            self._give_up()
        cpu_ns = thread_cpu_ns() if step is not None and step[3] else 0
        began_ns = now_ns()
        if args or kwargs:
            outputs = self._update(
                scheduler_output, model_runner_output, *args, **kwargs
            )
        else:
            outputs = self._update(scheduler_output, model_runner_output)
        ended_ns = now_ns()
        try:
            step_cpu_ns = None
            if step_id in self._cpu_read_after:
                step_cpu_ns = self._read_thread_cpu(step_id)
                if cpu_ns:
                    cpu_ns = self._thread_cpu_ns - cpu_ns
            elif step is not None and ended_ns - step[1] > LONG_NS:
                # Whether the thread worked, or the machine stood still.
                step_cpu_ns = self._since_last_clock(step_id)
            if requests.without_token:
                requests.note_first_tokens(step_id)
            timer = self._timer
            if timer.on:
                calls = timer.take() if timer.calls or timer.frequent else ()
                if step is not None:
                    aside_ns = self._aside_ns
                    self._append(
                        (step, began_ns, ended_ns, cpu_ns, step_cpu_ns, aside_ns, calls)
                    )
            if self._every > 1 and not self._open:
                if timer.on:
                    timer.turn_off()
                waits = requests.without_token or requests.waiting_for_kv
                if not (waits or self._overlaps):
                    self._leave_update()
            if step_id != self.next_step_id - 1:
                self._aside_ns += now_ns() - ended_ns
        except Exception:
            self._give_up()
        return outputs

    def _draw_clocks(self, step_id: int) -> bool:
        """Return whether a step that is recorded has CPU clocks; draw the next ones."""
        every, first = self._every, self._first_step
        number = (step_id - first) // every
        has_clocks = number == self._clocks.next
        if has_clocks:
            self._clocks.go_on()
            self._cpu_read_after.add(step_id)
        if every > 1:
            self._next_recorded = next_step = first + self._recorded.go_on()
            self._draw_at = next_step
        else:
            next_step = step_id + 1
            self._draw_at = max(first + self._clocks.next - 1, next_step)
        if number + 1 == self._clocks.next:
            # Its time is what has passed since the step before.
            self._cpu_read_after |= {next_step - 1, next_step}
        self._timer.draw(has_clocks)
        return has_clocks

    def _give_up(self) -> None:
        """Detach: the engine must serve all the same."""
        if self._gave_up:
            return
        logger.exception("kvtax: no step records from here on")
        self._gave_up = self._requests.detached = True
        self._next_recorded = NEVER
        self._timer.stop()
        # What others have wrapped since stays, and goes through here.
        if self._scheduler.schedule == self._timed_schedule:
            put(self._scheduler, "schedule", self._schedule)
        self._leave_update()

    def _since_last_clock(self, step_id: int) -> int | None:
        """Return the thread's CPU time since its clock was read last, in ns."""
        is_known = self._thread_cpu_step != NEVER
        before_ns, self._thread_cpu_ns = self._thread_cpu_ns, thread_cpu_ns()
        self._thread_cpu_step = step_id
        return self._thread_cpu_ns - before_ns if is_known else None

    def _read_thread_cpu(self, step_id: int) -> int | None:
        """Read the thread's CPU clock after a step; return the step's CPU time in ns.

        None if the clock was not read after the step before.
        """
        self._cpu_read_after.remove(step_id)
        before_ns, self._thread_cpu_ns = self._thread_cpu_ns, thread_cpu_ns()
        before_step, self._thread_cpu_step = self._thread_cpu_step, step_id
        if before_step != step_id - 1:
            return None
        return self._thread_cpu_ns - before_ns

    def _append_first(self, step: Updated) -> None:
        """Begin the files, and append the first step."""
        schema = "kvtax.engine_step/1"
        self._file = RecordFile(
            self.life, "engine_step", schema, self._header, self._finished
        )
        self._threads = ThreadsFile(
            self.life, lambda: self.next_step_id - 1, self._threads_before
        )
        self._append = self._file.append
        self._append(step)

    def _header(self) -> dict[str, Any]:
        return {
            "dp_rank": self._dp_rank,
            "every": STEPS_EVERY,
            "cpu_every": CPU_EVERY,
            **self._timer.header(),
        }

    def _finished(self, step: Updated) -> EngineStep:
        """Make a record, away from the engine's thread."""
        scheduled: Scheduled = step[0]
        updated = step[1:]
        (
            step_id,
            began_ns,
            ended_ns,
            cpu_ns,
            requests,
            tokens,
            prefill_tokens,
            preemptions,
            running,
            waiting,
            cache_size,
            free_blocks,
            aside_ns,
            calls,
        ) = scheduled
        step_us = update_us = update_cpu_us = step_cpu_us = None
        cost = wrapper_cost()
        schedule_ns = ended_ns - began_ns - cost.of(calls, began_ns, ended_ns)
        if updated:
            update_ns, updated_ns, update_cpu_ns, step_cpu_ns, until_ns, more = updated
            if more:
                calls = (*calls, *more)
            in_update_ns = cost.of(calls, update_ns, updated_ns)
            update_us = (updated_ns - update_ns - in_update_ns) / 1e3
            step_us = (updated_ns - began_ns - until_ns + aside_ns) / 1e3
            step_us -= cost.of(calls, began_ns, updated_ns) / 1e3
            if update_cpu_ns:
                update_cpu_us = update_cpu_ns / 1e3
            if step_cpu_ns is not None:
                step_cpu_us = step_cpu_ns / 1e3
        record = EngineStep(
            step_id,
            began_ns,
            schedule_ns / 1e3,
            None,
            step_us,
            update_us,
            running,
            waiting,
            requests,
            prefill_tokens,
            tokens - prefill_tokens,
            cache_size,
            free_blocks,
            preemptions,
            cpu_ns / 1e3 if cpu_ns else None,
            update_cpu_us,
            step_cpu_us,
        )
        if calls:
            fill(record, calls, self._timer.methods, FIELDS)
        return record


def _count_waiting(scheduler: Any) -> Callable[[Any], int] | None:
    """Return what counts waiting requests; None without queues of vLLM's kind."""
    try:
        len(scheduler.running), len(scheduler.waiting)
    except (AttributeError, TypeError):
        return None
    # A queue of vLLM's is a deque with a slow len() of its own.
    return deque.__len__ if isinstance(scheduler.waiting, deque) else len


def _block_pool(scheduler: Any) -> Any:
    """Return the scheduler's block pool; None if it has another kind of cache."""
    try:
        pool = scheduler.kv_cache_manager.block_pool
        len(pool.cached_block_hash_to_block), pool.free_block_queue.num_free_blocks
    except (AttributeError, TypeError):
        return None
    return pool


def _cache_of(pool: Any) -> Callable[[Any], Any]:
    """Return what gives the pool's map of cached blocks: a dict is counted at once."""
    blocks = getattr(pool, "cached_block_hash_to_block", None)
    if isinstance(getattr(blocks, "_cache", None), dict):
        return attrgetter("cached_block_hash_to_block._cache")
    return attrgetter("cached_block_hash_to_block")


def _prefill_tokens(
    requests: dict[str, Any], scheduled: dict[str, int], tokens: int, begun: set[str]
) -> int:
    """Count the tokens of this step that belong to prompts.

    `begun` are requests without a token yet: where all others have a token each, as in
    most steps, nobody looks at these.
    """
    prefill_tokens, more = 0, tokens - len(scheduled)
    for req_id in begun:
        count = scheduled.get(req_id, 0)
        if count and _is_prefill(requests[req_id], count):
            prefill_tokens += count
            more -= count - 1
    if not more:
        return prefill_tokens
    return sum(
        count
        for req_id, count in scheduled.items()
        if _is_prefill(requests[req_id], count)
    )


def _is_prefill(request: Any, count: int) -> bool:
    # schedule() has advanced num_computed_tokens past this step already.
    return bool(request.num_computed_tokens - count < request.num_prompt_tokens)
