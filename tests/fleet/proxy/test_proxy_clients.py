# SPDX-License-Identifier: Apache-2.0
"""A client that misbehaves costs its own request alone, and no instance is blamed."""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from proxy_lab import (
    DEADLINE_S,
    DONE,
    ask,
    connect,
    first_event,
    named,
    post,
    proxy,
    until,
)

from fleet.standin.process import Standin, standin
from lab.load.open_files import allow_open_files

pytestmark = pytest.mark.slow
IDLE = 10_000


def test_a_client_that_goes_away_aborts_the_request_at_the_instance(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two)) as on:
        with connect(on.url, ask(max_tokens=4000), X_Request_Id="gone") as client:
            first_event(client)
            assert on.instances()["a"]["requests"] == 1
        end = on.end("gone")
        assert end["status"] == "client_gone"
        assert end["generated_tokens"] < 4000
        until(
            lambda: two[0].metrics()["vllm:num_requests_running"] == 0,
            "the instance still works on it",
        )
        # And a client that does not wait for the first byte.
        two[1].set_faults("hang")
        with connect(on.url, ask(), X_Request_Id="sooner"):
            until(lambda: on.instances()["b"]["requests"] == 1, "not sent on")
        assert on.end("sooner")["status"] == "client_gone"
        on.idle()
        on.accounted(2)
        assert on.ejected() == []


def test_bad_bodies_get_4xx_and_reach_no_instance(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), "linear", "--max-body-bytes", "5000") as on:
        malformed = post(on.url, b'{"prompt": [1, 2')
        assert malformed.status == 400
        assert "no valid JSON" in malformed.error["message"]
        large = post(on.url, ask(list(range(5000))))
        assert large.status == 413
        assert "5000" in large.error["message"]
        on.accounted(2)
        assert [end["status"] for end in on.lines("end")] == ["refused"] * 2
        assert on.lines("decision") == []
        unknown = post(on.url, {"model": "other", "prompt": [1], "max_tokens": 1})
        assert unknown.status == 404
        assert unknown.error["message"] == "The model `other` does not exist."
        assert on.ejected() == []
        on.idle()


def resident_bytes(process: int) -> int:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_idle_connections_cost_little_and_hold_up_nobody(
    two: list[Standin], tmp_path: Path
) -> None:
    allow_open_files()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < IDLE + 1000:
        pytest.skip("too few files may be open")
    with proxy(tmp_path, named(two)) as on, ExitStack() as idle:
        post(on.url, ask())
        before = resident_bytes(on.process.pid)
        at = urlsplit(on.url)
        for _ in range(IDLE):
            one = socket.create_connection((at.hostname, at.port), DEADLINE_S)
            idle.enter_context(one)
        assert post(on.url, ask()).status == 200  # so all have been accepted
        grown = resident_bytes(on.process.pid) - before
        assert grown < IDLE * 10_000, f"{grown} bytes"
        times = []
        for _ in range(50):
            began = time.monotonic()
            assert post(on.url, ask(max_tokens=1)).status == 200
            times.append(time.monotonic() - began)
        assert sorted(times)[25] < 0.1


def test_a_slow_reader_holds_up_its_own_stream_and_takes_no_memory(
    tmp_path: Path,
) -> None:
    # 100,000 tokens are about 18 MB of events.
    asked = ask(max_tokens=100_000)
    with standin() as one, proxy(tmp_path, named([one])) as on:
        post(on.url, ask())
        before = resident_bytes(on.process.pid)
        with ExitStack() as clients:
            slow = [clients.enter_context(connect(on.url, asked)) for _ in range(4)]
            for client in slow:
                first_event(client)
            time.sleep(2)
            grown = resident_bytes(on.process.pid) - before
            assert grown < 8 * 2**20, f"{grown} bytes for streams that nobody reads"
            assert post(on.url, ask()).status == 200
            assert on.instances()["a"]["requests"] == 4
        on.idle()
        on.accounted(6)


def test_a_client_that_stops_reading_is_cut_and_its_request_aborted(
    tmp_path: Path,
) -> None:
    asked, options = ask(max_tokens=100_000), ("round_robin", "--client-timeout-s", "1")
    with standin() as one, proxy(tmp_path, named([one]), *options) as on:
        with connect(on.url, asked, X_Request_Id="stops") as client:
            first_event(client)
            assert on.instances()["a"]["requests"] == 1
            assert post(on.url, asked).body.endswith(DONE)
            end = on.end("stops")
            assert end["status"] == "client_gone"
            assert end["error"] == "the client took nothing for 1 s"
            assert end["generated_tokens"] < 100_000
            on.idle()
            until(
                lambda: one.metrics()["vllm:num_requests_running"] == 0,
                "the instance still works on it",
            )
        assert on.ejected() == []
        on.accounted(2)
