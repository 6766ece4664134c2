# SPDX-License-Identifier: Apache-2.0
"""Prefill on one instance, decode on another: what moves, and what happens when it
does not. Stand-ins speak Mooncake's and NIXL's side of the protocol.
"""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from offload_lab import (
    COMPUTED,
    EXTERNAL,
    HEAVY_FROM,
    RUNNING,
    SLOW,
    heavy_chat,
    named,
    slow_pair,
    unlike,
    went_to,
)
from proxy_lab import DONE, ask, connect, post, proxy, until

from fleet.standin.process import Standin, standin

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with slow_pair() as pair:
        yield pair


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize("form", ["completions", "chat/completions"])
def test_a_heavy_prefill_is_done_elsewhere_and_its_kv_is_used(
    two: list[Standin], tmp_path: Path, connector: str, form: str
) -> None:
    chat = form.startswith("chat")
    asked = (heavy_chat if chat else ask)(unlike(len(connector)), max_tokens=5)
    with proxy(tmp_path, named(two, connector), "elastic", *HEAVY_FROM) as on:
        answer = post(on.url, asked, f"/v1/{form}", X_Request_Id="h")
        end = on.end("h")
        d, p = went_to(on, "h")
        assert {d, p} == {"a", "b"}
        assert answer.headers["X-Kvtax-Instance"] == d == end["instance"]
        assert answer.headers["X-Kvtax-Prefill"] == p == end["prefill_instance"]
        assert (end["status"], end["fallback"]) == ("ok", None)
        assert answer.body.endswith(DONE)
        assert answer.body.count(b'"delta":{"content":' if chat else b"data: {") == 5
        decoding = two["ab".index(d)].metrics()
        assert decoding[EXTERNAL] >= 200
        on.idle()
        on.accounted(1)


def test_pools_prefill_in_one_and_decode_in_the_other(
    two: list[Standin], tmp_path: Path
) -> None:
    before = two[1].metrics()
    roles = named(two, "nixl", ("prefill", "decode"))
    with proxy(tmp_path, roles, "pd_sep") as on:
        for number in range(3):
            answer = post(on.url, ask(unlike(100 + number)))
            assert answer.status == 200
            assert answer.headers["X-Kvtax-Prefill"] == "a"
            assert answer.headers["X-Kvtax-Instance"] == "b"
        after = two[1].metrics()
        assert after[COMPUTED] - before[COMPUTED] == 3
        assert after[EXTERNAL] - before[EXTERNAL] == 3 * 200
        on.idle()


def test_a_prefill_instance_that_dies_costs_the_request_only_time(
    two: list[Standin], tmp_path: Path
) -> None:
    with standin(*SLOW) as one:
        roles = named([one, two[1]], "mooncake", ("prefill", "decode"))
        with proxy(tmp_path, roles, "pd_sep") as on:
            with ThreadPoolExecutor() as clients:
                long = unlike(200) * 10
                asked = clients.submit(post, on.url, ask(long), X_Request_Id="p")
                until(lambda: one.metrics()[RUNNING] == 1, "P does not prefill")
                assert on.get("/breakdown").json["offloads"] == 1
                one.process.kill()
                answer = asked.result()
            assert answer.status == 200
            assert answer.body.endswith(DONE)
            assert "X-Kvtax-Prefill" not in answer.headers
            end = on.end("p")
            assert (end["status"], end["prefill_instance"]) == ("ok", None)
            assert "prefill on a: a broke off" in end["fallback"]
            until(lambda: on.get("/health").json["ejected"] == ["a"], "not ejected")
            answer = post(on.url, ask(unlike(201)), X_Request_Id="after")
            assert answer.status == 200
            on.end("after")
            assert went_to(on, "after") == ("b", None)
            on.idle()
            on.accounted(2)


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize(
    ("fault", "limit", "failure", "said"),
    [
        ("hang", "--prefill-timeout-s", "prefill_slow", "prefill on a took over 1 s"),
        (
            "http500",
            "--handover-timeout-s",
            "prefill_refused",
            "prefill on a: HTTP 500",
        ),
        (
            "withhold_kv",
            "--handover-timeout-s",
            "handover_slow",
            "no first byte from b within 1 s of the prefill",
        ),
    ],
)
def test_an_offload_that_does_not_work_out_falls_back(
    two: list[Standin],
    tmp_path: Path,
    connector: str,
    fault: str,
    limit: str,
    failure: str,
    said: str,
) -> None:
    roles = named(two, connector, ("prefill", "decode"))
    with proxy(tmp_path, roles, "pd_sep", limit, "1") as on:
        two[0].set_faults(fault)
        answer = post(on.url, ask(unlike(300)), X_Request_Id="f")
        assert answer.status == 200
        assert answer.body.endswith(DONE)
        end = on.end("f")
        assert (end["status"], end["instance"]) == ("ok", "b")
        assert end["prefill_instance"] is None
        assert said in end["fallback"]
        assert end["offload"]["prefill_instance"] == "a"
        assert end["offload"]["failure"] == failure
        counted = f'kvtax_proxy_offloads_ended_total{{outcome="{failure}",prefill="a"}}'
        assert f"{counted} 1.0" in on.get("/metrics").body.decode()
        on.idle()
        on.accounted(1)
    until(
        lambda: two[1].metrics()[RUNNING] == 0,
        "the given up pull is still there",
    )


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize("form", ["completions", "chat/completions"])
def test_a_pull_that_ends_without_a_token_falls_back(
    two: list[Standin], tmp_path: Path, connector: str, form: str
) -> None:
    """vLLM ends the stream this way, under status 200, if it could not load the KV.

    A chat has then already named its role, which is no token.
    """
    chat, path = form.startswith("chat"), f"/v1/{form}"
    asked = heavy_chat if chat else ask
    roles = named(two, connector, ("prefill", "decode"))
    with proxy(tmp_path, roles, "pd_sep") as on:
        two[1].set_faults("no_token", "none")
        answer = post(on.url, asked(unlike(350)), path, X_Request_Id="f")
        assert answer.status == 200
        assert answer.body.count(b'"role"') == chat
        assert answer.body.count(b"data: {") == 3 + chat
        end = on.end("f")
        assert (end["status"], end["prefill_instance"]) == ("ok", None)
        assert end["fallback"] == "b ended the stream without a token"
        # Where there is nothing to fall back to, it is a failure and says so.
        two[1].set_faults("no_token")
        answer = post(on.url, asked(unlike(351)), path, X_Request_Id="g")
        assert answer.status == 502
        assert "b ended the stream without a token" in answer.error["message"]
        assert on.end("g")["status"] == "failed"
        on.idle()


def test_a_client_that_goes_during_an_offload_aborts_both_sides(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), "elastic", *HEAVY_FROM) as on:
        with connect(on.url, ask(unlike(400) * 20), X_Request_Id="gone"):
            until(lambda: on.get("/breakdown").json["offloads"] == 1, "no offload")
        assert on.end("gone")["status"] == "client_gone"
        on.idle()
        on.accounted(1)
        for one in two:
            until(lambda one=one: one.metrics()[RUNNING] == 0, "")


def test_offloads_under_way_are_counted_and_capped(
    two: list[Standin], tmp_path: Path
) -> None:
    cap = (*HEAVY_FROM, "max_offloads=1")
    with proxy(tmp_path, named(two), "elastic", *cap) as on, ThreadPoolExecutor() as go:
        first = go.submit(post, on.url, ask(unlike(500) * 10), X_Request_Id="first")
        until(lambda: on.get("/breakdown").json["offloads"] == 1, "no offload")
        second = go.submit(post, on.url, ask(unlike(501)), X_Request_Id="second")
        assert first.result().status == second.result().status == 200
        assert "X-Kvtax-Prefill" in first.result().headers
        assert "X-Kvtax-Prefill" not in second.result().headers
        on.end("second")
        decision = next(one for one in on.lines("decision") if one["id"] == "second")
        assert decision["reason"] == "1 offloads under way: not offloaded"
        assert decision["class"] == "HEAVY"
        on.idle()


def test_an_offload_counts_from_its_decision_on(
    two: list[Standin], tmp_path: Path
) -> None:
    """Not from when P's bootstrap server has said where its KV will be."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        instances = [
            msgspec.structs.replace(one, bootstrap_url=url) for one in named(two)
        ]
        options = (*HEAVY_FROM, "max_offloads=1", "--prefill-timeout-s", "2")
        with (
            proxy(tmp_path, instances, "elastic", *options) as on,
            ThreadPoolExecutor() as go,
        ):
            first = go.submit(post, on.url, ask(unlike(510)), X_Request_Id="first")
            until(lambda: on.get("/breakdown").json["offloads"] == 1, "not counted")
            assert post(on.url, ask(unlike(511)), X_Request_Id="second").status == 200
            on.end("second")
            decision = next(
                one for one in on.lines("decision") if one["id"] == "second"
            )
            assert decision["reason"] == "1 offloads under way: not offloaded"
            assert first.result().status == 200
            assert re.match(f"prefill on [ab]: {url}", on.end("first")["fallback"])
            on.idle()


def test_a_request_for_several_answers_is_not_offloaded(
    two: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(two), "elastic", *HEAVY_FROM) as on:
        answer = post(on.url, ask(unlike(600), n=2), X_Request_Id="n")
        assert answer.status == 200
        assert "X-Kvtax-Prefill" not in answer.headers
        assert on.end("n")["fallback"] == "asks for several answers"
        said = [{"role": "user", "content": "x" * 800}]
        asked = {"model": "null", "max_tokens": 3, "messages": said}
        answer = post(on.url, asked, "/v1/messages", X_Request_Id="m")
        assert answer.status == 200
        assert on.end("m")["fallback"] == "/v1/messages knows of no transfers"
        refused = post(on.url, json.dumps(ask(unlike(601), max_tokens=0)).encode())
        assert refused.status == 400
        on.idle()


def test_counters_are_back_at_zero_after_everything_has_gone_wrong(
    two: list[Standin], tmp_path: Path
) -> None:
    """Random faults on either side of offloads, and clients that leave at any time."""
    chance = random.Random(7)
    faults = ["none"] * 4 + ["hang", "stall", "http500", "inband", "cut", "truncated"]
    faults += ["withhold_kv", "hang_first"]
    limits = ["--prefill-timeout-s", "1", "--handover-timeout-s", "1"]
    limits += ["--silence-timeout-s", "2"]

    def one(number: int, fault: str, tokens: int, leaves_after_s: float | None) -> None:
        asked = ask([number] * tokens, 5)
        named = {"X_Standin_Fault": fault, "X_Request_Id": f"r/{number}"}
        if leaves_after_s is None:
            post(on.url, asked, **named)
            return
        with connect(on.url, asked, **named):
            time.sleep(leaves_after_s)

    with (
        proxy(tmp_path, named(two), "elastic", *HEAVY_FROM, *limits) as on,
        ThreadPoolExecutor(16) as clients,
    ):
        asked = [
            clients.submit(
                one,
                number,
                chance.choice(faults),
                chance.choice([3, 150]),
                chance.choice([None, None, chance.random() / 2]),
            )
            for number in range(100)
        ]
        for answer in asked:
            answer.result()
        on.idle()
        on.accounted(100)
        statuses = {end["status"] for end in on.lines("end")}
        assert {"ok", "failed", "client_gone"} <= statuses
        assert None not in statuses
