# SPDX-License-Identifier: Apache-2.0
"""The stand-in has each fault as announced, once."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from tests.harness.standin.process import standin

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 41))
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    with standin() as running:
        yield running


def complete(url, timeout_s=120.0, fault=None, **fields):
    """Return the status and the body of a completion."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    body = {"model": "null", "prompt": PROMPT, "max_tokens": 4, **fields}
    headers = {"X-Standin-Fault": fault} if fault else {}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def events(body: bytes) -> list:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("fault", ["hang", "hang_first", "stall"])
def test_a_fault_that_hangs_hangs(server, fault):
    with pytest.raises(TimeoutError):
        complete(server.url, fault=fault, timeout_s=0.3, **STREAM)


def test_other_faults_are_what_they_are_called(server):
    assert complete(server.url, fault="http500", **STREAM)[0] == 500
    _, body = complete(server.url, fault="inband", **STREAM)
    assert "error" in events(body)[1]
    _, body = complete(server.url, fault="truncated", **STREAM)
    assert len(events(body)) == 1
    with pytest.raises(http.client.IncompleteRead):
        complete(server.url, fault="cut", **STREAM)
    *tokens, usage, _ = events(complete(server.url, fault="short", **STREAM)[1])
    assert len(tokens) == usage["usage"]["completion_tokens"] == 3
    assert not events(complete(server.url, fault="no_usage", **STREAM)[1])[-2]["usage"]


def test_d_waits_in_vain_for_kv_that_is_withheld():
    params = {"do_remote_decode": True, "transfer_id": "a"}
    with standin() as p, standin() as d:
        _, body = complete(
            p.url, fault="withhold_kv", max_tokens=1, kv_transfer_params=params
        )
        given = json.loads(body)["kv_transfer_params"]
        with pytest.raises(TimeoutError):
            complete(d.url, kv_transfer_params=given, timeout_s=0.3)
