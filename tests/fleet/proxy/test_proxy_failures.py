# SPDX-License-Identifier: Apache-2.0
"""An instance that fails: every request ends in a clear error and one end line."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from proxy_lab import (
    DONE,
    SLOW,
    ask,
    connect,
    first_event,
    free_port,
    named,
    post,
    proxy,
    rest,
    until,
)

from fleet.standin.process import Standin, standin
from lab.records.instances import Instance

pytestmark = pytest.mark.slow


def test_an_instance_killed_in_mid_stream_ends_with_an_error_event(
    two: list[Standin], tmp_path: Path
) -> None:
    with standin(*SLOW) as one, proxy(tmp_path, named([one, two[1]])) as on:
        with connect(on.url, ask(max_tokens=400), X_Request_Id="cut") as client:
            begun = first_event(client)
            assert b"200 OK" in begun
            one.process.kill()
            body = begun + rest(client)
        assert b'data: {"error":' in body
        assert b"a broke off in the middle of its answer" in body
        assert b"[DONE]" not in body
        end = on.end("cut")
        assert (end["status"], end["instance"]) == ("failed", "a")
        until(lambda: on.ejected() == ["a"], "a is not ejected")
        for _ in range(3):
            answer = post(on.url, ask())
            assert answer.status == 200
            assert answer.headers["X-Kvtax-Instance"] == "b"
        on.idle()
        on.accounted(4)


def test_a_hung_instance_is_given_up_ejected_and_taken_back(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), "round_robin", "--silence-timeout-s", "1") as on:
        with connect(on.url, ask(max_tokens=400), X_Request_Id="mid") as client:
            first_event(client)
            os.kill(two[0].process.pid, signal.SIGSTOP)
            try:
                assert b"a went silent in the middle of its answer" in rest(client)
                post(on.url, ask())  # b's turn
                answer = post(on.url, ask(), X_Request_Id="first")
                assert answer.status == 504
                assert answer.error["instance"] == "a"
                assert "did not answer in time" in answer.error["message"]
                until(lambda: on.ejected() == ["a"], "a is not ejected")
                assert post(on.url, ask()).headers["X-Kvtax-Instance"] == "b"
            finally:
                os.kill(two[0].process.pid, signal.SIGCONT)
        until(lambda: on.ejected() == [], "a is not back")
        served = {post(on.url, ask()).headers["X-Kvtax-Instance"] for _ in range(2)}
        assert served == {"a", "b"}
        assert on.end("mid")["status"] == on.end("first")["status"] == "failed"
        on.idle()
        on.accounted(6)


def test_without_open_files_left_no_instance_is_to_blame(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two)) as on, ExitStack() as clients:
        pid = on.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)

        def refused() -> list[dict]:
            # The system may refuse a connection, too: then the next one.
            with suppress(ConnectionError):
                clients.enter_context(connect(on.url, ask(max_tokens=4000)))
            return on.lines("end")

        files = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files + 9, before[1]))
        end = until(refused, "no request was refused")[0]
        time.sleep(2)  # and /health is polled
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert (end["status"], end["http_status"]) == ("refused", 503)
        assert "Too many open files" in end["error"]
        assert b"kvtax_proxy_ejections_total 0.0" in on.get("/metrics").body
        clients.close()
        on.idle()


def test_no_failure_is_answered_with_200(two: list[Standin], tmp_path: Path) -> None:
    with proxy(tmp_path, named(two), "round_robin", "--silence-timeout-s", "1") as on:
        said = {
            "http500": (500, "engine is dead"),
            "hang": (504, "did not answer in time"),
            "hang_first": (504, "sent no first byte in time"),
        }
        for fault, (status, message) in said.items():
            answer = post(on.url, ask(), X_Standin_Fault=fault, X_Request_Id=fault)
            assert (answer.status, on.end(fault)["http_status"]) == (status, status)
            assert message in answer.error["message"]
            assert answer.headers["Content-Type"].startswith("application/json")
        for one in two:
            one.set_faults(after=0)
        for fault in ("none", "inband", "none", "cut", "none", "truncated"):
            for _ in two:
                answer = post(on.url, ask(), X_Standin_Fault=fault)
                if fault == "none":
                    assert answer.status == 200
                    continue
                # The first byte may be here before it is known to be the last.
                assert answer.status == 502 or b'"error"' in answer.body
                assert DONE not in answer.body or b"engine died" in answer.body
        on.idle()
        on.accounted(15)
        statuses = [end["status"] for end in on.lines("end")]
        assert (statuses.count("ok"), statuses.count("failed")) == (6, 9)


def test_a_stream_that_only_ends_is_not_passed_off_as_complete(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two)) as on:
        for fault, said in {
            "truncated": "ended its answer without [DONE]",
            "cut": "broke off in the middle",
        }.items():
            answer = post(on.url, ask(), X_Standin_Fault=fault, X_Request_Id=fault)
            assert said in answer.error["message"]
            assert answer.error["instance"] in "ab"
            assert DONE not in answer.body
            assert said in on.end(fault)["error"]
        inband = post(on.url, ask(), X_Standin_Fault="inband", X_Request_Id="inband")
        assert b"engine died" in inband.body
        assert on.end("inband")["status"] == "failed"
        on.idle()
        on.accounted(3)


def test_a_refused_connection_is_tried_once_elsewhere(
    two: list[Standin], tmp_path: Path
) -> None:
    nobody = [Instance(name, f"http://127.0.0.1:{free_port()}") for name in "xyz"]
    with proxy(tmp_path, [nobody[0], *named(two)]) as on:
        answer = post(on.url, ask(), X_Request_Id="moved")
        assert answer.status == 200
        assert answer.headers["X-Kvtax-Instance"] in "ab"
        end = on.end("moved")
        first, second = on.lines("decision")
        assert (first["attempt"], first["instance"]) == (0, "x")
        assert (second["attempt"], second["instance"]) == (1, end["instance"])
        assert on.ejected() == ["x"]
    with proxy(tmp_path, nobody) as on:
        answer = post(on.url, ask(), X_Request_Id="nowhere")
        assert answer.status == 503
        assert "no connection to" in answer.error["message"]
        until(lambda: len(on.ejected()) == 3, "not ejected")
        answer = post(on.url, ask())
        assert (answer.status, on.get("/health").status) == (503, 503)
        assert "no connection to" in answer.error["message"]
        on.idle()
        on.accounted(2)
