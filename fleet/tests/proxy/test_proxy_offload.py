# SPDX-License-Identifier: Apache-2.0
"""Prefill elsewhere: its KV arrives, or the request is served without it."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from fleet.tests.proxy.proxy_lab import DONE, Proxy, ask, connect, post, proxy, until
from tests.harness.standin.process import Standin, standin

from kvtax_fleet.proxy.offload import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    Backoff,
)
from kvtax_fleet.records.decisions import Offload
from kvtax_fleet.records.instances import Instance

pytestmark = pytest.mark.slow
# A prompt of HEAVY tokens takes 0.2 s to prefill.
SLOW = ("--prefill-us-per-token", "1000", "--decode-us", "1000")
HEAVY = list(range(200))
HEAVY_FROM = ("--parameters", "warm_tokens=50", "heavy_tokens=100")
EXTERNAL = "vllm:prompt_tokens_by_source_total{external_kv_transfer}"
RUNNING = "vllm:num_requests_running"
COMPUTED = "vllm:prompt_tokens_by_source_total{local_compute}"


def named(
    standins: list[Standin], connector: str = "mooncake", roles: tuple = ("both",) * 2
) -> list[Instance]:
    return [
        Instance(name, each.url, role, connector, bootstrap_url=each.url)
        for name, each, role in zip("ab", standins, roles, strict=True)
    ]


def unlike(number: int) -> list[int]:
    """A heavy prompt that no other test has."""
    return [number, *HEAVY]


def heavy_chat(prompt: list[int], **fields: object) -> dict:
    """The same as a chat: one turn, of these numbers."""
    asked = ask(**fields)
    del asked["prompt"]
    content = " ".join(f"number {token}" for token in prompt)
    return asked | {"messages": [{"role": "user", "content": content}]}


def went_to(on: Proxy, id_: str) -> tuple[str, str]:
    """The decode and the prefill instance that were decided on."""
    decision = next(each for each in on.lines("decision") if each["id"] == id_)
    return decision["instance"], decision["prefill_instance"]


def has_been_asked(each: Standin) -> bool:
    """Whether a request has come to it since the last call."""
    with urllib.request.urlopen(f"{each.url}/arrivals") as answer:
        return json.load(answer) != []


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with standin(*SLOW) as a, standin(*SLOW) as b:
        yield [a, b]


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize("form", ["completions", "chat/completions"])
def test_a_heavy_prefill_is_done_elsewhere_and_its_kv_is_used(
    two, tmp_path, connector, form
):
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
        offload = end["offload"]
        assert "failure" not in offload
        moments = [offload[f"{name}_ns"] for name in ("begun", "prefill_asked")]
        asked = ["prefilled", "decode_asked"]
        # Over Mooncake both are asked at once.
        for name in asked if connector == "nixl" else asked[::-1]:
            moments.append(offload[f"{name}_ns"])
        moments += [offload["ended_ns"], end["end_ns"]]
        assert moments == sorted(moments)
        # 201 tokens at 1 ms each.
        assert offload["prefilled_ns"] - offload["prefill_asked_ns"] > 0.2 * S
        on.idle()
        on.accounted(1)


def test_pools_prefill_in_one_and_decode_in_the_other(two, tmp_path):
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


def test_a_prefill_instance_that_dies_costs_the_request_only_time(two, tmp_path):
    with standin(*SLOW, "--faults", "hang") as each:
        roles = named([each, two[1]], "mooncake", ("prefill", "decode"))
        with proxy(tmp_path, roles, "pd_sep") as on:
            with ThreadPoolExecutor() as clients:
                asked = clients.submit(post, on.url, ask(unlike(200)), X_Request_Id="p")
                until(lambda: has_been_asked(each), "P is not asked")
                assert on.get("/breakdown").json["offloads"] == 1
                each.process.kill()
                answer = asked.result()
            assert answer.status == 200
            assert answer.body.endswith(DONE)
            assert "X-Kvtax-Prefill" not in answer.headers
            end = on.end("p")
            assert (end["status"], end["prefill_instance"]) == ("ok", None)
            assert "prefill on a: a broke off" in end["fallback"]
            until(lambda: on.out() == ["a"], "not out")
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
    two, tmp_path, connector, fault, limit, failure, said
):
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
        on.idle()
        on.accounted(1)
    until(
        lambda: two[1].metrics()[RUNNING] == 0,
        "the given up pull is still there",
    )


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
@pytest.mark.parametrize("form", ["completions", "chat/completions"])
def test_a_pull_that_ends_without_a_token_falls_back(two, tmp_path, connector, form):
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


def test_a_client_that_goes_during_an_offload_aborts_both_sides(two, tmp_path):
    with proxy(tmp_path, named(two), "elastic", *HEAVY_FROM) as on:
        with connect(on.url, ask(unlike(400) * 20), X_Request_Id="gone"):
            until(lambda: on.get("/breakdown").json["offloads"] == 1, "no offload")
        assert on.end("gone")["status"] == "client_gone"
        on.idle()
        on.accounted(1)
        for each in two:
            until(lambda each=each: each.metrics()[RUNNING] == 0, "")


def test_an_offload_counts_from_its_decision_on(two, tmp_path):
    """Not from when P's bootstrap server has said where its KV will be."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        instances = [
            msgspec.structs.replace(each, bootstrap_url=url) for each in named(two)
        ]
        options = (*HEAVY_FROM, "max_offloads=1")
        with (
            proxy(tmp_path, instances, "elastic", *options) as on,
            ThreadPoolExecutor() as go,
        ):
            first = go.submit(post, on.url, ask(unlike(510)), X_Request_Id="first")
            until(lambda: on.get("/breakdown").json["offloads"] == 1, "not counted")
            assert post(on.url, ask(unlike(511)), X_Request_Id="second").status == 200
            on.end("second")
            decision = next(
                each for each in on.lines("decision") if each["id"] == "second"
            )
            assert decision["reason"] == "1 offloads under way: not offloaded"
            assert decision["class"] == "HEAVY"
            silent.close()
            assert first.result().status == 200
            assert re.match(f"prefill on [ab]: {url}", on.end("first")["fallback"])
            on.idle()


def test_a_request_for_several_answers_is_not_offloaded(two, tmp_path):
    with proxy(tmp_path, named(two), "elastic", *HEAVY_FROM) as on:
        answer = post(on.url, ask(unlike(600), n=2), X_Request_Id="n")
        assert answer.status == 200
        assert "X-Kvtax-Prefill" not in answer.headers
        assert on.end("n")["fallback"] == "several answers are requested"
        refused = post(on.url, json.dumps(ask(unlike(601), max_tokens=0)).encode())
        assert refused.status == 400
        on.idle()


def test_counters_are_back_at_zero_after_everything_has_gone_wrong(two, tmp_path):
    """Random faults on either side of offloads, and clients that leave at any time."""
    chance = random.Random(7)
    faults = ["none"] * 4 + ["hang", "stall", "http500", "inband", "cut", "truncated"]
    faults += ["withhold_kv", "hang_first"]
    limits = ["--prefill-timeout-s", "1", "--handover-timeout-s", "1"]
    limits += ["--silence-timeout-s", "2"]

    def each(
        number: int, fault: str, tokens: int, leaves_after_s: float | None
    ) -> None:
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
                each,
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


S = 1_000_000_000


class Clock:
    now_s = 100.0

    def __call__(self) -> int:
        return int(self.now_s * S)


def test_a_pair_rests_longer_each_time_until_kv_arrives():
    clock = Clock()
    backoff = Backoff(clock)
    lengths = []
    for _ in range(8):
        assert backoff.left_s("p", "d") == 0
        backoff.failed("p", "d")
        lengths.append(backoff.left_s("p", "d"))
        clock.now_s += lengths[-1]
    assert lengths == [10, 20, 40, 80, 160, 320, 320, 320]
    assert (FIRST_BACKOFF_S, LONGEST_BACKOFF_S) == (10, 320)
    backoff.worked("p", "d")
    backoff.failed("p", "d")
    assert backoff.left_s("p", "d") == 10


def test_only_that_pair_rests_and_failures_that_come_together_count_once():
    clock = Clock()
    backoff = Backoff(clock)
    for _ in range(3):
        backoff.failed("p", "d")
    assert backoff.left_s("p", "d") == 10
    assert backoff.left_s("p", "e") == backoff.left_s("d", "p") == 0


def test_phases_are_what_lies_between_the_moments():
    offload = Offload("p", 1 * S, 2 * S, 5 * S, 5 * S, 9 * S)
    assert offload.phases_s() == {
        "before_prefill": 1,
        "prefill": 3,
        "handover": 4,
        "total": 8,
    }
    # D's first token can be here before P's own answer is.
    assert Offload("p", 1 * S, 1 * S, 7 * S, 1 * S, 6 * S).phases_s()["handover"] == 0
    assert Offload("p", 1 * S, ended_ns=2 * S).phases_s() == {"total": 1}


def test_where_no_kv_arrives_the_next_request_does_not_wait_for_it(two, tmp_path):
    roles = named(two, "nixl", ("prefill", "decode"))
    with proxy(tmp_path, roles, "pd_sep", "--handover-timeout-s", "1") as on:
        two[0].set_faults("withhold_kv")
        for name in ("first", "second"):
            answer = post(on.url, ask(unlike(len(name))), X_Request_Id=name)
            assert answer.status == 200
        first, second = on.end("first"), on.end("second")
        assert first["offload"]["failure"] == "handover_slow"
        assert second["offload"]["failure"] == "resting"
        assert "no KV arrived from a at b" in second["fallback"]
        assert "prefill_asked_ns" not in second["offload"]
        assert (second["status"], second["instance"]) == ("ok", "b")
        on.idle()
        on.accounted(2)


def test_kv_goes_to_no_instance_without_room_for_it(two, tmp_path):
    small = [msgspec.structs.replace(each, kv_tokens=220) for each in named(two)]
    with proxy(tmp_path, small, "elastic", *HEAVY_FROM) as on:
        answer = post(on.url, ask(unlike(800)), X_Request_Id="h")
        assert answer.status == 200
        assert "X-Kvtax-Prefill" not in answer.headers
        on.end("h")
        decision = next(each for each in on.lines("decision") if each["id"] == "h")
        assert decision["reason"].endswith(
            "has no room for KV to arrive: not offloaded"
        )


def test_a_policy_may_give_a_prefill_more_time_than_the_proxy_does(two, tmp_path):
    patient = (*HEAVY_FROM, "prefill_timeout_s=9", "--prefill-timeout-s", "0.05")
    with proxy(tmp_path, named(two), "elastic", *patient) as on:
        answer = post(on.url, ask(unlike(900)), X_Request_Id="h")
        assert answer.headers["X-Kvtax-Prefill"]
        assert on.end("h")["fallback"] is None
