# SPDX-License-Identifier: Apache-2.0
"""A proxy that is stopped, killed or started twice leaves a whole log."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from proxy_lab import (
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

from fleet.standin.process import Standin

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_proxy_tells_its_clients_and_its_log(
    two: list[Standin], tmp_path: Path, number: signal.Signals
) -> None:
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
        assert on.process.wait(20) == 0
        assert [end["status"] for end in on.lines("end")] == ["proxy_stopped"] * 2


def test_a_killed_and_restarted_proxy_serves_again_and_keeps_the_old_log(
    two: list[Standin], tmp_path: Path
) -> None:
    port = str(free_port())
    with proxy(tmp_path, named(two), "linear", "--port", port) as on:
        assert post(on.url, ask(), X_Request_Id="done").status == 200
        on.end("done")
        with connect(on.url, ask(max_tokens=4000), X_Request_Id="lost") as client:
            first_event(client)
            until(lambda: len(on.lines("decision")) == 2, "decision not written")
            on.process.kill()
            rest(client)
        decided = {one["id"] for one in on.lines("decision")}
        ended = {one["id"] for one in on.lines("end")}
        assert decided - ended == {"lost"}
    with proxy(tmp_path, named(two), "linear", "--port", port) as again:
        assert post(again.url, ask()).status == 200
        assert again.instances()["a"]["requests"] == 0
        until(
            lambda: all(one.metrics()["vllm:num_requests_running"] == 0 for one in two),
            "an instance still works for the killed proxy",
        )


def test_a_log_that_exists_is_not_written_over(
    two: list[Standin], tmp_path: Path
) -> None:
    (tmp_path / "0.decisions.jsonl").write_text("mine")
    with proxy(tmp_path, named(two)) as on:
        assert on.url == ""
        assert on.process.wait(20) == 2
    assert (tmp_path / "0.decisions.jsonl").read_text() == "mine"
