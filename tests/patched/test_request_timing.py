# SPDX-License-Identifier: Apache-2.0
"""Each request has one record, and it says what became of it in which steps."""

from __future__ import annotations

import pytest
from recorder_lab import new_engine
from request_lab import FROM_ELSEWHERE, LATE, recording_requests, run

from lab.records.engine_requests import ids_of_completion, read_engine_requests

PATCHES = ["step_timing_v1", "step_timing_v2", "request_timing"]

HOW = ["one_step_at_a_time", "two_steps_in_flight"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("requests")


@pytest.mark.parametrize("how", HOW)
def test_every_request_has_one_record(model, folder, how):
    found = run(model, folder, how)
    assert set(found.requests) == set(found.seen)
    assert len(found.seen) == 40


@pytest.mark.parametrize("how", HOW)
def test_steps_are_those_in_which_it_was_scheduled_and_got_tokens(model, folder, how):
    found = run(model, folder, how)
    for request_id, seen in found.seen.items():
        request = found.requests[request_id]
        if seen.aborted:
            continue
        assert request.first_step == seen.steps[0]
        assert request.first_token_step == seen.token_steps[0]
        assert request.last_step == seen.token_steps[-1]


@pytest.mark.parametrize("how", HOW)
def test_tokens_are_those_that_it_was_sent(model, folder, how):
    found = run(model, folder, how)
    for request_id, seen in found.seen.items():
        request = found.requests[request_id]
        assert request.prompt_tokens == seen.prompt_tokens
        if not seen.aborted:
            assert request.output_tokens == seen.tokens
            assert request.external_tokens == seen.external_tokens
            assert 0 <= request.cached_tokens < request.prompt_tokens
    assert any(request.cached_tokens for request in found.requests.values())


@pytest.mark.parametrize("how", HOW)
def test_a_preempted_request_says_from_which_step_to_which(model, folder, how):
    found = run(model, folder, how)
    preempted = 0
    for request_id, seen in found.seen.items():
        request = found.requests[request_id]
        assert request.preempted_steps[::2] == seen.preempted or seen.aborted
        for left, back in zip(
            request.preempted_steps[::2], request.preempted_steps[1::2], strict=False
        ):
            preempted += 1
            assert not [step for step in seen.steps if left <= step < back]
            assert back in seen.steps
    if how == "one_step_at_a_time":
        assert preempted > 3


@pytest.mark.parametrize("how", HOW)
def test_waiting_for_kv_is_recorded_from_beginning_to_end(model, folder, how):
    found = run(model, folder, how)
    waited = 0
    for request_id, seen in found.seen.items():
        request = found.requests[request_id]
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
    found = run(model, folder, how)
    aborted = [one for one, seen in found.seen.items() if seen.aborted]
    assert aborted
    for request_id, request in found.requests.items():
        assert request.finish_reason == ("abort" if request_id in aborted else "length")
        assert found.begun_ns < request.finished_ns < found.ended_ns


def test_a_request_that_never_ended_is_recorded_without_an_end(model, tmp_path):
    with recording_requests(tmp_path) as recorder:
        engine = new_engine(LATE, model)
        engine.add([1] * 20, 50)
        for _ in range(3):
            engine.core.step()
        recorder._append_open()
    (request,) = read_engine_requests(tmp_path / "engine_request.jsonl").records
    assert request.first_step is not None
    assert request.finished_ns is None


def test_ids_are_hashed_and_lose_what_vllm_added(model, tmp_path):
    with recording_requests(tmp_path, plain_ids=False) as recorder:
        name = recorder._name("chatcmpl-mine-0a1b2c3d")
        completion = recorder._name("cmpl-s/0-0-0a1b2c3d")
        engine = new_engine(LATE, model)
        engine.add([1] * 20, 2)
        engine.run_to_end()
    lines = read_engine_requests(tmp_path / "engine_request.jsonl")
    assert lines.header.ids == "hashed"
    assert lines.records[0].id == recorder._name("0") != "0"
    # printf chatcmpl-mine | b2sum -l 64
    assert name == recorder._name("chatcmpl-mine") == "ab5f599a47caf3c2"
    assert completion == ids_of_completion("s/0")[1]


def test_without_a_folder_nothing_is_recorded():
    from vllm.v1 import step_requests

    assert step_requests.REQUESTS is None
