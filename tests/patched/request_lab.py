# SPDX-License-Identifier: Apache-2.0
"""A real engine whose requests are recorded, and what somebody who watched it saw."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from overlapping import Overlapping
from recorder_lab import ENOUGH_BLOCKS, new_engine, recording
from vllm.v1 import step_requests
from vllm.v1.core.sched import scheduler as scheduler_module

from connectors.noop import NoopConnector
from lab.records.engine_requests import EngineRequest, read_engine_requests
from lab.serving import null_engine

LATE = {
    "kv_connector": "Late",
    "kv_connector_module_path": "request_lab",
    "kv_role": "kv_both",
}
# So few that requests are preempted.
NUM_BLOCKS = 40
# Prompts of at least so many tokens come from elsewhere, as far as whole blocks go.
FROM_ELSEWHERE = 100
WORKER_STEPS_UNTIL_THERE = 4
MOST_STEPS = 5_000

# The requests that wait for KV, with the worker's steps until theirs is there.
_coming: dict[str, int] = {}


class Late(NoopConnector):
    """Brings the KV of long prompts, some steps after it was asked for it."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._brought: set[str] = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        more = whole - num_computed_tokens
        brought = request.request_id in self._brought
        if request.num_prompt_tokens < FROM_ELSEWHERE or more <= 0 or brought:
            return 0, False
        return more, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self._brought.add(request.request_id)
            _coming[request.request_id] = WORKER_STEPS_UNTIL_THERE

    def get_finished(self, finished_req_ids):
        there = set()
        for request_id in list(_coming):
            _coming[request_id] -= 1
            if not _coming[request_id]:
                del _coming[request_id]
                there.add(request_id)
        return None, there or None


@dataclass
class Seen:
    """A request as somebody saw it who looked at the engine after every call."""

    prompt_tokens: int
    steps: list[int] = field(default_factory=list)
    """Steps that scheduled it."""
    token_steps: list[int] = field(default_factory=list)
    """Steps that brought it tokens."""
    preempted: list[int] = field(default_factory=list)
    tokens: int = 0
    external_tokens: int = 0
    waited_for_kv: bool = False
    aborted: bool = False


@dataclass
class Recorded:
    requests: dict[str, EngineRequest]
    seen: dict[str, Seen]
    begun_ns: int
    ended_ns: int


@contextmanager
def recording_requests(folder: Path, plain_ids: bool = True):
    recorder = step_requests.RequestRecorder(str(folder), plain_ids)
    with pytest.MonkeyPatch.context() as patch, recording(folder):
        for module in (step_requests, scheduler_module):
            patch.setattr(module, "REQUESTS", recorder)
        yield recorder
        recorder._file.flush()


@cache
def run(model: Path, folder: Path, how: str) -> Recorded:
    """`how`: one step at a time, or two in flight."""
    folder = folder / how
    folder.mkdir()
    _coming.clear()
    num_blocks = NUM_BLOCKS
    begun_ns = time.perf_counter_ns()
    with pytest.MonkeyPatch.context() as patch, recording_requests(folder):
        if how == "two_steps_in_flight":
            num_blocks = ENOUGH_BLOCKS.get(vllm.__version__, NUM_BLOCKS)
            executor = SimpleNamespace(get_class=lambda _: Overlapping)
            patch.setattr(null_engine, "Executor", executor)
        engine = new_engine(LATE, model, num_blocks)
        seen = _watch(engine)
        _serve(engine, seen)
    lines = read_engine_requests(folder / "engine_request.jsonl")
    return Recorded(
        {request.id: request for request in lines.records},
        seen,
        begun_ns,
        time.perf_counter_ns(),
    )


def _watch(engine) -> dict[str, Seen]:
    """What schedule() and update_from_output() tell, without a look at the patch."""
    seen: dict[str, Seen] = {}
    scheduler = engine.core.scheduler
    add, schedule = scheduler.add_request, scheduler.schedule
    update = scheduler.update_from_output

    def watched_add(request):
        seen[request.request_id] = Seen(request.num_prompt_tokens)
        return add(request)

    def watched_schedule(*told):
        output = schedule(*told)
        for request_id in output.num_scheduled_tokens:
            seen[request_id].steps.append(output.step_id)
        for request_id in output.preempted_req_ids or ():
            seen[request_id].preempted.append(output.step_id)
        for request_id, one in seen.items():
            request = scheduler.requests.get(request_id)
            if request is not None:
                waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
                one.waited_for_kv |= waits
        return output

    def watched_update(output, *rest):
        result = update(output, *rest)
        for outputs in result.values():
            for one in outputs.outputs:
                if one.new_token_ids:
                    seen[one.request_id].tokens += len(one.new_token_ids)
                    seen[one.request_id].token_steps.append(output.step_id)
                told = null_engine.cached_tokens(one)
                if told is not None and not seen[one.request_id].external_tokens:
                    seen[one.request_id].external_tokens = told[1]
        return result

    scheduler.add_request, scheduler.schedule = watched_add, watched_schedule
    scheduler.update_from_output = watched_update
    return seen


def _serve(engine, seen: dict[str, Seen]) -> None:
    """Arrivals, cached prefixes, KV from elsewhere, aborts and preemptions."""
    chance = random.Random(7)
    prompts = [[n + 1] * chance.randrange(1, 200) for n in range(12)]
    for _ in range(40):
        request = engine.add(chance.choice(prompts), chance.randrange(1, 60))
        for _ in range(chance.randrange(6)):
            if engine.core.scheduler.has_requests():
                engine.core.step_fn()
        if chance.random() < 0.1 and request in engine.core.scheduler.requests:
            seen[request].aborted = True
            engine.core.abort_requests([request])
    for _ in range(MOST_STEPS):
        if not (engine.core.scheduler.has_requests() or engine.core.batch_queue):
            return
        engine.core.step_fn()
    raise AssertionError(f"not at an end after {MOST_STEPS} steps")
