# SPDX-License-Identifier: Apache-2.0
"""An instance that fails, and a proxy that is stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fleet.tests.proxy.proxy_lab import (
    DEADLINE_S,
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
from kvtax.paths import REPOSITORY
from tests.harness.standin.process import standin

from kvtax_fleet.records.instances import Instance

pytestmark = pytest.mark.slow


def test_an_instance_killed_in_mid_stream_ends_with_an_error_event(two, tmp_path):
    with standin(*SLOW) as each, proxy(tmp_path, named([each, two[1]])) as on:
        headers = {"X_Request_Id": "cut", "Connection": "close"}
        with connect(on.url, ask(max_tokens=400), **headers) as client:
            begun = first_event(client)
            assert b"200 OK" in begun
            each.process.kill()
            body = begun + rest(client)
        assert b'data: {"error":' in body
        assert b"a broke off in the middle of its answer" in body
        assert b"[DONE]" not in body
        end = on.end("cut")
        assert (end["status"], end["instance"]) == ("failed", "a")
        until(lambda: on.out() == ["a"], "a is not out")
        for _ in range(3):
            answer = post(on.url, ask())
            assert answer.status == 200
            assert answer.headers["X-Kvtax-Instance"] == "b"
        on.idle()
        on.accounted(4)


def test_a_hung_instance_is_given_up_ejected_and_taken_back(two, tmp_path):
    with proxy(tmp_path, named(two), "round_robin", "--silence-timeout-s", "2") as on:
        headers = {"X_Request_Id": "mid", "Connection": "close"}
        with connect(on.url, ask(max_tokens=400), **headers) as client:
            first_event(client)
            os.kill(two[0].process.pid, signal.SIGSTOP)
            try:
                assert b"a went silent in the middle of its answer" in rest(client)
                post(on.url, ask())  # b's turn
                # Nothing has been sent to its client, so that b may answer it.
                assert post(on.url, ask()).headers["X-Kvtax-Instance"] == "b"
                until(lambda: on.out() == ["a"], "a is not out")
                assert post(on.url, ask()).headers["X-Kvtax-Instance"] == "b"
            finally:
                os.kill(two[0].process.pid, signal.SIGCONT)
        until(lambda: on.out() == [], "a is not back")
        served = {post(on.url, ask()).headers["X-Kvtax-Instance"] for _ in range(2)}
        assert served == {"a", "b"}
        assert on.end("mid")["status"] == "failed"
        on.idle()
        on.accounted(6)


FAULTS = {
    "http500": (500, "engine is dead"),
    "hang": (504, "did not answer in time"),
    "hang_first": (504, "sent no first byte in time"),
    # Under a status 200, if the first event is good.
    "truncated": (200, "ended its answer without [DONE]"),
    "cut": (200, "broke off in the middle"),
    "inband": (200, "engine died"),
}


def test_no_failure_is_passed_off_as_a_complete_answer(two, tmp_path):
    with proxy(tmp_path, named(two), "round_robin", "--silence-timeout-s", "2") as on:
        for fault, (status, message) in FAULTS.items():
            answer = post(on.url, ask(), X_Standin_Fault=fault, X_Request_Id=fault)
            assert (answer.status, on.end(fault)["http_status"]) == (status, status)
            assert on.end(fault)["status"] == "failed"
            assert message in answer.body.decode()
            assert DONE not in answer.body or fault == "inband"
            kind = "application/json" if status != 200 else "text/event-stream"
            assert answer.headers["Content-Type"].startswith(kind)
        for each in two:
            each.set_faults(after=0)
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
        on.accounted(18)
        statuses = [end["status"] for end in on.lines("end")]
        assert (statuses.count("ok"), statuses.count("failed")) == (6, 12)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:99999", f"http://{'a' * 70}:1", "http://[::1", "http://:1"],
)
def test_an_instance_that_no_request_can_be_sent_to_is_refused(tmp_path, url):
    command = [sys.executable, "-m", "kvtax", "proxy", "--policy", "linear"]
    printed = subprocess.run(
        [*command, "--url", "http://127.0.0.1:1", "--url", f"b={url}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert printed.returncode == 2
    assert f"b: {url!r}" in printed.stderr
    assert "http://HOST:PORT expected" in printed.stderr


class Quoting(BaseHTTPRequestHandler):
    """An instance whose errors quote the request, as vLLM's do."""

    def do_GET(self) -> None:
        self.answer(200, "text/plain", b"")

    def do_POST(self) -> None:
        prompt = self.rfile.read(int(self.headers["Content-Length"])).decode()
        error = json.dumps({"error": {"message": prompt}}).encode()
        if "X-Event" in self.headers:
            self.answer(200, "text/event-stream", b"data: " + error + b"\n\n")
        else:
            self.answer(400, "application/json", error)

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_log_is_its_owners_and_has_no_text_of_a_prompt(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Quoting) as server, ExitStack() as ends:
        threading.Thread(target=server.serve_forever).start()
        ends.callback(server.shutdown)
        instance = Instance("a", f"http://127.0.0.1:{server.server_port}")
        with proxy(tmp_path, [instance]) as on:
            for id_, headers in {"answer": {}, "event": {"X_Event": "1"}}.items():
                answer = post(on.url, ask("my secret"), X_Request_Id=id_, **headers)
                assert b"my secret" in answer.body
                assert on.end(id_)["status"] == "failed"
            assert b"my secret" not in on.log.read_bytes()
            assert on.end("answer")["error"] == "a answered HTTP 400"
            assert on.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_proxy_tells_its_clients_and_its_log(two, tmp_path, number):
    with proxy(tmp_path, named(two)) as on, ExitStack() as clients:
        two[1].set_faults("hang")
        mid = clients.enter_context(connect(on.url, ask(max_tokens=4000)))
        begun = first_event(mid)
        early = clients.enter_context(connect(on.url, ask()))
        until(lambda: on.instances()["b"]["requests"] == 1, "not sent on")
        on.process.send_signal(number)
        assert b"the proxy was stopped" in begun + rest(mid)
        answer = rest(early)
        assert b"503 Service Unavailable" in answer
        assert b"the proxy was stopped" in answer
        assert on.process.wait(DEADLINE_S) == 128 + number
        assert [end["status"] for end in on.lines("end")] == ["proxy_stopped"] * 2


def test_a_killed_and_restarted_proxy_serves_again_and_keeps_the_old_log(two, tmp_path):
    port = str(free_port())
    with proxy(tmp_path, named(two), "linear", "--port", port) as on:
        assert post(on.url, ask(), X_Request_Id="done").status == 200
        on.end("done")
        with connect(on.url, ask(max_tokens=4000), X_Request_Id="lost") as client:
            first_event(client)
            until(lambda: len(on.lines("decision")) == 2, "decision not written")
            on.process.kill()
            what_is_left(client)
        decided = {each["id"] for each in on.lines("decision")}
        ended = {each["id"] for each in on.lines("end")}
        assert decided - ended == {"lost"}
    with proxy(tmp_path, named(two), "linear", "--port", port) as again:
        assert post(again.url, ask()).status == 200
        assert again.instances()["a"]["requests"] == 0
        until(
            lambda: all(
                each.metrics()["vllm:num_requests_running"] == 0 for each in two
            ),
            "an instance still works for the killed proxy",
        )


def what_is_left(client: socket.socket) -> bytes:
    """Of an answer whose server may have been killed."""
    try:
        return rest(client)
    except ConnectionResetError:
        return b""


def test_a_log_that_exists_is_not_written_over(two, tmp_path):
    log = tmp_path / "0.decisions.jsonl"
    log.write_text("mine")
    with proxy(tmp_path, named(two)) as on:
        assert on.url == ""
        assert on.process.wait(DEADLINE_S) == 2
    assert log.read_text() == "mine"


def test_a_port_is_not_shared_with_another_proxy(two, tmp_path):
    port = str(free_port())
    with (
        proxy(tmp_path, named(two), "linear", "--port", port) as on,
        proxy(tmp_path, named(two), "linear", "--port", port) as late,
    ):
        assert late.url == ""
        assert late.process.wait(DEADLINE_S) == 2
        assert post(on.url, ask()).status == 200
