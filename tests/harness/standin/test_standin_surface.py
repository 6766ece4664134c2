# SPDX-License-Identifier: Apache-2.0
"""The stand-in as a process: vLLM's HTTP surface, and each fault as it is announced."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.harness.standin.process import standin
from tests.proc.living import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0

PROMPT = list(range(1, 41))
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    with standin("--max-model-len", "1000") as running:
        yield running


def call(url, method, path, body=None, timeout_s=DEADLINE_S, headers=()):
    """(status, headers, body) of one request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    data = json.dumps(body) if isinstance(body, dict) else body
    try:
        connection.request(method, path, data, dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def complete(url, path="/v1/completions", timeout_s=DEADLINE_S, fault=None, **fields):
    body = {"model": "null", "prompt": PROMPT, "max_tokens": 4, **fields}
    headers = {"X-Standin-Fault": fault} if fault else {}
    return call(url, "POST", path, body, timeout_s, headers.items())


def events(body: bytes) -> list:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_a_completion_streamed_and_whole_say_the_same(server):
    status, _, body = complete(server.url)
    whole = json.loads(body)
    assert status == 200
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == 40
    assert whole["usage"]["completion_tokens"] == 4
    status, headers, body = complete(server.url, return_token_ids=True, **STREAM)
    *tokens, usage, done = events(body)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    assert sum(len(event["choices"][0]["token_ids"]) for event in tokens) == 4
    reasons = [event["choices"][0]["finish_reason"] for event in tokens]
    assert reasons == [None, None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert done == b"[DONE]"


@pytest.mark.parametrize("stream", [{}, STREAM])
def test_chat_and_text_are_served_and_shared_beginnings_are_hits(server, stream):
    def ask(question):
        messages = [{"role": "user", "content": "x" * 200 + question}]
        path = "/v1/chat/completions"
        body = complete(server.url, path, messages=messages, prompt=None, **stream)[2]
        return events(body)[-2] if stream else json.loads(body)

    ask("a")
    details = ask("b")["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 48
    text = json.loads(complete(server.url, prompt="y" * 80)[2])
    assert text["usage"]["prompt_tokens"] == 20


def test_metrics_add_up(server):
    before = server.metrics()
    cached = 0
    for _ in range(3):
        answer = json.loads(complete(server.url, prompt=[7] * 50)[2])
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prefix_cache_hits_total"] == cached == 96
    assert grown["vllm:prefix_cache_queries_total"] == 150
    assert grown["vllm:prompt_tokens_total"] == 150
    assert grown["vllm:prompt_tokens_by_source_total{local_compute}"] == 54
    assert grown["vllm:prompt_tokens_by_source_total{local_cache_hit}"] == 96
    assert grown["vllm:generation_tokens_total"] == 12
    assert grown["vllm:request_success_total{length}"] == 3
    call(server.url, "POST", "/reset_prefix_cache")
    answer = json.loads(complete(server.url, prompt=[7] * 50)[2])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


BAD = {
    "torn": (b'{"model": "null"', 400, "body"),
    "model": ({"model": "gpt", "prompt": [1]}, 404, "does not exist"),
    "too long": ({"model": "null", "prompt": [1] * 990}, 400, "1000 tokens"),
    "empty": ({"model": "null", "prompt": []}, 400, "empty"),
    "prompt": ({"model": "null", "prompt": {"a": 1}}, 400, "prompt"),
    "two": ({"model": "null", "prompt": [[1], [2]]}, 400, "prompt"),
    "max_tokens": ({"model": "null", "prompt": [1], "max_tokens": 0}, 400, "max_t"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_served_is_refused_as_vllm_does(server, case):
    body, expected, message = BAD[case]
    status, _, answer = call(server.url, "POST", "/v1/completions", body)
    assert status == expected
    assert message in json.loads(answer)["error"]["message"]


def test_health_and_models(server):
    assert call(server.url, "GET", "/health")[0] == 200
    (model,) = json.loads(call(server.url, "GET", "/v1/models")[2])["data"]
    assert (model["id"], model["max_model_len"]) == ("null", 1000)


@pytest.mark.parametrize("fault", ["hang", "hang_first", "stall"])
def test_a_fault_that_hangs_hangs(server, fault):
    with pytest.raises(TimeoutError):
        complete(server.url, fault=fault, timeout_s=0.3, **STREAM)


def test_other_faults_are_what_they_are_called(server):
    assert complete(server.url, fault="http500", **STREAM)[0] == 500
    _, _, body = complete(server.url, fault="inband", **STREAM)
    assert "error" in events(body)[1]
    _, _, body = complete(server.url, fault="truncated", **STREAM)
    assert len(events(body)) == 1
    with pytest.raises(http.client.IncompleteRead):
        complete(server.url, fault="cut", **STREAM)
    *tokens, usage, _ = events(complete(server.url, fault="short", **STREAM)[2])
    assert len(tokens) == usage["usage"]["completion_tokens"] == 3
    assert not events(complete(server.url, fault="no_usage", **STREAM)[2])[-2]["usage"]
    status, _, body = complete(server.url, fault="nonsense")
    assert status == 400 and b"no fault 'nonsense'" in body


def test_faults_go_round_in_a_cycle(server):
    server.set_faults("none", "http500", "none")
    statuses = [complete(server.url)[0] for _ in range(6)]
    server.set_faults()
    assert statuses == [200, 500, 200] * 2


def test_a_deaf_server_accepts_and_never_answers(server):
    server.set_faults(deaf=True)
    with pytest.raises(TimeoutError):
        call(server.url, "GET", "/health", timeout_s=0.3)
    server.set_faults()
    assert call(server.url, "GET", "/health")[0] == 200


def test_whoever_hangs_up_leaves_nothing_running():
    with standin("--step-us", "20000") as slow:
        for fault in ("none", "stall", "hang_first"):
            with pytest.raises(TimeoutError):
                _wait_for_all_of(slow.url, fault)
        eventually(lambda: not slow.metrics()["vllm:num_requests_running"])
        # It would have ended by itself, too, after 20 s.
        assert slow.metrics()["vllm:request_success_total{length}"] == 0


def _wait_for_all_of(url, fault):
    """Ask for more than comes in time."""
    body = {"model": "null", "prompt": PROMPT, "max_tokens": 1000, **STREAM}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.client.HTTPResponse, "read", _read_for_a_while)
        headers = {"X-Standin-Fault": fault}.items()
        call(url, "POST", "/v1/completions", body, 0.5, headers)


def _read_for_a_while(response):
    deadline = time.monotonic() + 0.3
    while response.read1():
        if time.monotonic() > deadline:
            raise TimeoutError


def test_exit_ends_the_process_mid_stream():
    with standin("--faults", "exit") as dying:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            complete(dying.url, **STREAM)
        assert dying.process.wait(DEADLINE_S) == 1


def prefill(p, transfer_id, **more):
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    answer = complete(p.url, max_tokens=1, kv_transfer_params=params, **more)[2]
    return json.loads(answer)["kv_transfer_params"]


def test_kv_moves_from_p_to_d():
    with standin() as p, standin() as d:
        params = prefill(p, "a")
        assert params["do_remote_prefill"] is True
        answer = json.loads(complete(d.url, kv_transfer_params=params)[2])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
        received = d.metrics()[
            "vllm:prompt_tokens_by_source_total{external_kv_transfer}"
        ]
        assert received == 39
        # As with Mooncake, where both are asked at once.
        query = json.loads(call(p.url, "GET", "/query")[2])
        params = {
            "do_remote_prefill": True,
            "transfer_id": "b",
            "remote_bootstrap_addr": p.url,
            "remote_engine_id": query["0"]["engine_id"],
        }
        with ThreadPoolExecutor(1) as pool:
            at_d = pool.submit(complete, d.url, kv_transfer_params=params)
            time.sleep(0.2)
            assert not at_d.done(), "nothing to pull yet"
            prefill(p, "b")
            assert at_d.result()[0] == 200


def test_d_waits_in_vain_for_kv_that_never_comes():
    with standin() as p, standin() as d:
        params = prefill(p, "a", fault="withhold_kv")
        with pytest.raises(TimeoutError):
            complete(d.url, kv_transfer_params=params, timeout_s=0.3)
        params = prefill(p, "b")
        p.process.kill()
        p.process.wait()
        with pytest.raises(TimeoutError):
            complete(d.url, kv_transfer_params=params, timeout_s=0.3)
        eventually(lambda: not d.metrics()["vllm:num_requests_running"])
        assert complete(d.url)[0] == 200
