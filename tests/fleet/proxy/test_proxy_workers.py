# SPDX-License-Identifier: Apache-2.0
"""A proxy of several processes decides as one, outlives each, and leaves none."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from proxy_lab import (
    Proxy,
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
from lab.serving.supervise import descendants

pytestmark = pytest.mark.slow
WORKERS = 3
OPTIONS = ("load_only", "--workers", str(WORKERS))


def workers_of(on: Proxy) -> set[int]:
    return set(descendants(on.process.pid))


def decisions(on: Proxy) -> list[dict[str, Any]]:
    """Of all workers, the oldest first."""
    return list(map(json.loads, on.get("/decisions?n=1000").body.splitlines()))


def deciders(on: Proxy) -> set[str]:
    """The logs of those that have decided something."""
    logs = on.log.parent.glob("*.decisions.*.jsonl")
    return {log.name for log in logs if b'"decision"' in log.read_bytes()}


def what_is_left(client: socket.socket) -> bytes:
    """Of an answer whose server may have been killed."""
    try:
        return rest(client)
    except ConnectionResetError:
        return b""


def gone(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    except OSError:
        return True


def test_each_worker_decides_by_the_load_of_all_and_none_is_left_over(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), *OPTIONS) as on, ExitStack() as clients:
        big = clients.enter_context(connect(on.url, ask([5] * 3000, 2000)))
        first_event(big)
        # Each goes where the big one is not, whoever decides; at once, so that no
        # worker has the time to take them all.
        small = [
            clients.enter_context(connect(on.url, ask(max_tokens=4))) for _ in range(40)
        ]
        for client in small:
            first_event(client)
        chosen = [one["instance"] for one in decisions(on)]
        assert Counter(chosen[1:]) == {({"a", "b"} - {chosen[0]}).pop(): 40}
        until(lambda: len(deciders(on)) > 1, "only one worker has decided")
        assert sum(one["requests"] for one in on.instances().values()) >= 1
        big.close()
        on.idle()


def test_any_worker_speaks_for_all(two: list[Standin], tmp_path: Path) -> None:
    with proxy(tmp_path, named(two), *OPTIONS) as on:
        with ExitStack() as clients:
            asked = [clients.enter_context(connect(on.url, ask())) for _ in range(30)]
            for client in asked:
                first_event(client)
        on.idle()
        for _ in range(2 * WORKERS):
            ended = [sum(one["ended"].values()) for one in on.instances().values()]
            assert sum(ended) == 30
            lines = on.get("/metrics").body.decode().splitlines()
            counts = [one for one in lines if one.startswith("kvtax_proxy_requests_t")]
            assert sum(float(one.split()[-1]) for one in counts) == 30
            times = [one["at_ns"] for one in decisions(on)]
            assert len(times) == 30
            assert times == sorted(times)


def test_a_killed_worker_is_replaced_and_what_it_had_is_no_load(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), *OPTIONS) as on:
        before = workers_of(on)
        assert len(before) == WORKERS
        assert post(on.url, ask(), X_Session_Id="s").status == 200
        with connect(on.url, ask(max_tokens=4000)) as client:
            first_event(client)
            for worker in before:
                os.kill(worker, signal.SIGKILL)
                until(lambda: len(workers_of(on)) == WORKERS, "not replaced")
                assert post(on.url, ask()).status == 200
            what_is_left(client)
        assert not before & workers_of(on)
        on.idle()
        assert post(on.url, ask(), X_Session_Id="s").status == 200
        turns = [one for one in decisions(on) if one["session"] == "s"]
        assert turns[-1]["snapshot"]["pinned_turns"] == 1
        until(
            lambda: all(one.metrics()["vllm:num_requests_running"] == 0 for one in two),
            "an instance still works for a killed worker",
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_proxy(
    two: list[Standin], tmp_path: Path, number: signal.Signals
) -> None:
    with proxy(tmp_path, named(two), *OPTIONS) as on:
        workers = workers_of(on)
        with connect(on.url, ask(max_tokens=4000)) as client:
            begun = first_event(client)
            on.process.send_signal(number)
            told = b"the proxy was stopped" in begun + what_is_left(client)
        status = on.process.wait(20)
        until(lambda: all(map(gone, workers)), "a worker is left")
        if number != signal.SIGKILL:
            assert told
            assert status == 0


def test_what_one_worker_cannot_do_is_said_once_and_ends_all(
    two: list[Standin], tmp_path: Path
) -> None:
    (tmp_path / "0.decisions.0.jsonl").write_text("mine")
    with proxy(tmp_path, named(two), *OPTIONS) as on:
        assert on.url == ""
        assert on.process.wait(20) == 2
    assert (tmp_path / "0.decisions.0.jsonl").read_text() == "mine"
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_port_is_not_shared_with_another_proxy(
    two: list[Standin], tmp_path: Path
) -> None:
    port = str(free_port())
    with (
        proxy(tmp_path, named(two), *OPTIONS, "--port", port) as on,
        proxy(tmp_path, named(two), *OPTIONS, "--port", port) as late,
    ):
        assert late.url == ""
        assert late.process.wait(20) == 1
        assert post(on.url, ask()).status == 200
