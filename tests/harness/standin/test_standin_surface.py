# SPDX-License-Identifier: Apache-2.0
"""The stand-in: vLLM's HTTP surface, each fault as announced, and steps that cost."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.standin.process import standin
from tests.harness.standin.standin_engine import BlockCache, Engine, Sequence, Shape
from tests.proc.living import eventually

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0

PROMPT = list(range(1, 41))
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    with standin() as running:
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


PROMPTS_OF_BITS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12
)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@given(PROMPTS_OF_BITS)
def test_hits_are_the_longest_prefix_of_whole_blocks_seen_before(prompts):
    cache = BlockCache(num_blocks=1000, block_tokens=4)
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        hashes = cache.hashes(ids(prompt))
        expected = 0
        while expected + 4 < len(prompt) and tuple(prompt[: expected + 4]) in seen:
            expected += 4
        assert cache.hit_tokens(hashes, len(prompt)) == expected
        cache.insert(hashes)
        seen |= {tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)}
        assert len(cache) == len(seen)


async def _with_engine(shape: Shape, work):
    engine = Engine(shape)
    running = asyncio.create_task(engine.run())
    try:
        return await work(engine)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _gaps_ms(engine: Engine, sequence: Sequence) -> list[float]:
    """Times between the tokens of a sequence, the first from its arrival."""
    gaps, last = [], perf_counter()
    async for _ in engine.generate(sequence):
        gaps.append((perf_counter() - last) * 1e3)
        last = perf_counter()
    return gaps


def test_a_prefill_takes_its_time_and_slows_down_the_decodes_beside_it():
    # 100 tokens per step at 0.2 ms: a chunk takes 20 ms, a decode step alone 1 ms.
    shape = Shape(step_us=1000, prefill_us_per_token=200, max_batched_tokens=100)

    async def work(engine: Engine):
        decode = Sequence(ids([1] * 10), 60)
        decoding = asyncio.create_task(_gaps_ms(engine, decode))
        while decode.made < 20:
            await asyncio.sleep(0.001)
        prefill = await _gaps_ms(engine, Sequence(ids([2] * 400), 1))
        return await decoding, prefill

    decodes, prefill = asyncio.run(_with_engine(shape, work))
    assert prefill[0] >= 0.9 * 400 * 0.2
    slow = [gap for gap in decodes[1:] if gap > 15]
    assert len(slow) >= 4, "one for each chunk, more on a busy machine"
    assert min(decodes[1:]) < 15


def test_a_batch_costs_more_than_one_sequence():
    def cost_ns(decoding: int) -> int:
        engine = Engine(Shape(step_us=100, decode_us=10))
        sequences = [Sequence(ids([1]), 5) for _ in range(decoding)]
        for sequence in sequences:
            sequence.computed = 1
        return engine._cost_ns(dict.fromkeys(sequences, 1))

    assert cost_ns(1) == 110_000
    assert cost_ns(8) == 180_000


def test_no_more_run_at_once_than_allowed():
    async def work(engine: Engine):
        tasks = [
            asyncio.create_task(_gaps_ms(engine, Sequence(ids([n]), 5)))
            for n in range(1, 7)
        ]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(engine.running))
            await asyncio.sleep(0)
        return most

    assert asyncio.run(_with_engine(Shape(step_us=100, max_num_seqs=2), work)) == 2
