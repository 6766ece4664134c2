# SPDX-License-Identifier: Apache-2.0
"""The stand-in does each fault as its name says, and counts what it serves."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.harness.standin.process import Standin, standin

pytestmark = pytest.mark.slow
PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def server():
    with standin() as running:
        yield running


def answer(at: Standin, fault: str = "none", **fields: Any) -> bytes:
    """The body of a streamed answer; TimeoutError after half a second of silence."""
    body = {"model": "null", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **fields}
    headers = {"Content-Type": "application/json", "X-Standin-Fault": fault}
    url = f"{at.url}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=0.5).read()


def test_a_good_answer_and_the_counters_add_up(server):
    before = server.metrics()
    answer(server)
    events = answer(server).split(b"\n\n")
    assert (len(events), events[-2]) == (7, b"data: [DONE]")
    usage = json.loads(events[-3].removeprefix(b"data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prompt_tokens_total"] == 80
    assert grown["vllm:generation_tokens_total"] == 8
    assert grown["vllm:prompt_tokens_by_source_total{local_compute}"] == 48
    assert grown["vllm:request_success_total{length}"] == 2


@pytest.mark.parametrize("fault", ["hang", "hang_first", "stall"])
def test_a_fault_that_hangs_hangs(server, fault):
    with pytest.raises(TimeoutError):
        answer(server, fault)


@pytest.mark.parametrize(
    ("fault", "is_so"),
    [
        ("inband", lambda body: b'"error"' in body),
        ("truncated", lambda body: body.count(b"data:") == 1),
        ("short", lambda body: b'"completion_tokens":3' in body),
        ("no_usage", lambda body: b'"total_tokens"' not in body),
        ("no_token", lambda body: b'"text"' not in body and b"[DONE]" in body),
    ],
)
def test_a_stream_goes_wrong_as_its_fault_says(server, fault, is_so):
    assert is_so(answer(server, fault))


def test_a_refusal_and_a_cut_are_errors(server):
    with pytest.raises(urllib.error.HTTPError, match="500"):
        answer(server, "http500")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer(server, "cut")
