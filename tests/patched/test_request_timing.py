# SPDX-License-Identifier: Apache-2.0
"""Each request has one record, which agrees with a witness inside the engine."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from overlapping import two_steps_in_flight
from recorder_lab import new_engine, recording, serve
from vllm.kvtax_probe import record_engine

from connectors.noop import NoopConnector
from kvtax.engine import null_engine
from kvtax.records.files import Lines
from kvtax.records.requests import (
    EngineRequest,
    hashed_id,
    key_of_ids,
    read_engine_requests,
)
from kvtax.records.steps import only_life

LATE = {
    "kv_connector": "Late",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}
# So few that requests are preempted.
NUM_BLOCKS = 40
# Prompts of at least so many tokens come from elsewhere, as far as whole blocks go.
FROM_ELSEWHERE = 100
WORKER_STEPS_UNTIL_THERE = 4

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


class Recorded(NamedTuple):
    pairs: list[tuple[EngineRequest, Seen]]
    begun_ns: int
    ended_ns: int


@cache
def run(model: Path, folder: Path, how: str) -> Recorded:
    """`how`: one step at a time, one in eight recorded, or two in flight."""
    folder = folder / how
    folder.mkdir()
    _coming.clear()
    early = how == "two_steps_in_flight"
    every = 8 if how == "one_step_in_eight_recorded" else 1
    flight = two_steps_in_flight(NUM_BLOCKS) if early else nullcontext(NUM_BLOCKS)
    begun_ns = time.perf_counter_ns()
    records_steps = recording(folder, STEPS_EVERY=every)
    with pytest.MonkeyPatch.context() as patch, records_steps, flight as num_blocks:
        patch.setenv("KVTAX_REQUEST_IDS", "plain")
        engine = new_engine(LATE, model, num_blocks)
        record_engine(engine.core)
        # The witness comes where the recorder may have left the scheduler's update.
        first = engine.add([1] * 20, 20)
        while engine.core.scheduler.has_requests() or engine.core.batch_queue:
            engine.core.step_fn()
        seen = _watch(engine)
        for request_id in serve(engine, seed=7, requests=40):
            seen[request_id].aborted = True
    records = {request.id: request for request in recorded(folder).records}
    del records[first]
    assert records.keys() == seen.keys(), "each request has one record"
    pairs = [(records[request_id], seen[request_id]) for request_id in seen]
    return Recorded(pairs, begun_ns, time.perf_counter_ns())


def _watch(engine) -> dict[str, Seen]:
    """What schedule() and update_from_output() tell, without a look at the patch."""
    seen: dict[str, Seen] = {}
    scheduler = engine.core.scheduler
    add, schedule = scheduler.add_request, scheduler.schedule
    update = scheduler.update_from_output

    def watched_add(request):
        seen[request.request_id] = Seen(request.num_prompt_tokens)
        return add(request)

    def watched_schedule(*arguments):
        output = schedule(*arguments)
        for request_id in output.num_scheduled_tokens:
            seen[request_id].steps.append(output.step_id)
        for request_id in output.preempted_req_ids or ():
            seen[request_id].preempted.append(output.step_id)
        for request_id, times in seen.items():
            request = scheduler.requests.get(request_id)
            if request is not None:
                waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
                times.waited_for_kv |= waits
        return output

    def watched_update(output, *rest):
        result = update(output, *rest)
        for outputs in result.values():
            for out in outputs.outputs:
                if out.new_token_ids:
                    seen[out.request_id].tokens += len(out.new_token_ids)
                    seen[out.request_id].token_steps.append(output.step_id)
                cached = null_engine.cached_tokens(out)
                if cached is not None and not seen[out.request_id].external_tokens:
                    seen[out.request_id].external_tokens = cached[1]
        return result

    scheduler.add_request, scheduler.schedule = watched_add, watched_schedule
    scheduler.update_from_output = watched_update
    return seen


PATCHES = ["step_timing_v2"]

HOW = ["one_step_at_a_time", "one_step_in_eight_recorded", "two_steps_in_flight"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("requests")


@pytest.mark.parametrize("how", HOW)
def test_steps_and_tokens_are_those_that_it_got(model, folder, how):
    pairs = run(model, folder, how).pairs
    assert len(pairs) == 40
    for request, seen in pairs:
        assert request.prompt_tokens == seen.prompt_tokens
        if seen.aborted:
            continue
        assert request.first_step == seen.steps[0]
        assert request.first_token_step == seen.token_steps[0]
        assert request.last_step == seen.token_steps[-1]
        assert request.output_tokens == seen.tokens
        assert request.external_tokens == seen.external_tokens
        assert 0 <= request.cached_tokens < request.prompt_tokens
    assert any(request.cached_tokens for request, _ in pairs)


@pytest.mark.parametrize("how", HOW)
def test_a_preempted_request_says_from_which_step_to_which(model, folder, how):
    preempted = 0
    for request, seen in run(model, folder, how).pairs:
        steps = request.preempted_steps
        assert steps[::2] == seen.preempted or seen.aborted
        for left, back in zip(steps[::2], steps[1::2], strict=False):
            preempted += 1
            assert not [step for step in seen.steps if left <= step < back]
            assert back in seen.steps
    if how != "two_steps_in_flight":
        assert preempted > 3


@pytest.mark.parametrize("how", HOW)
def test_waiting_for_kv_is_recorded_from_beginning_to_end(model, folder, how):
    waited = 0
    for request, seen in run(model, folder, how).pairs:
        moments = [request.arrival_ns, *request.kv_wait_ns, request.finished_ns]
        assert moments == sorted(moments)
        assert bool(request.kv_wait_ns) == seen.waited_for_kv
        if request.kv_wait_ns and not seen.aborted:
            waited += 1
            assert len(request.kv_wait_ns) == 2
            assert request.prompt_tokens >= FROM_ELSEWHERE
    assert waited > 3


@pytest.mark.parametrize("how", HOW)
def test_an_aborted_request_says_so(model, folder, how):
    pairs, begun_ns, ended_ns = run(model, folder, how)
    assert any(seen.aborted for _, seen in pairs)
    for request, seen in pairs:
        assert request.finish_reason == ("abort" if seen.aborted else "length")
        assert begun_ns < request.finished_ns < ended_ns


def test_a_request_that_never_ended_is_recorded_without_an_end(model, tmp_path):
    with recording(tmp_path):
        engine = new_engine(LATE, model)
        engine.add([1] * 20, 50)
        for _ in range(3):
            engine.core.step()
    (request,) = recorded(tmp_path).records
    assert request.first_step is not None
    assert request.finished_ns is None


def test_ids_are_hashed_and_lose_what_vllm_added(model, tmp_path):
    with recording(tmp_path):
        engine = new_engine(LATE, model)
        engine.add([1] * 20, 2)
        engine.run_to_end()
        name = engine.core._kvtax_recorder._requests._name
    lines = recorded(tmp_path)
    assert lines.header.ids == "keyed"
    assert lines.records[0].id == name("0") != "0"
    key = key_of_ids(only_life(tmp_path))
    assert name("chatcmpl-mine-0a1b2c3d") == hashed_id("chatcmpl-mine", key)
    assert name("cmpl-s/0-0-0a1b2c3d") == hashed_id("cmpl-s/0-0", key)


def recorded(folder: Path) -> Lines:
    return read_engine_requests(only_life(folder) / "engine_request.jsonl")
