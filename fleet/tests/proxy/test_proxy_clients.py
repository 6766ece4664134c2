# SPDX-License-Identifier: Apache-2.0
"""Clients of the APIs get the answers that they expect."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import anthropic
import openai
import psutil
import pytest
from fleet.tests.proxy.proxy_lab import (
    DEADLINE_S,
    DONE,
    Proxy,
    ask,
    connect,
    first_event,
    free_port,
    get,
    named,
    post,
    proxy,
    resident_bytes,
    until,
)
from kvtax.load import allow_open_files

from kvtax_fleet.records.instances import Instance
from kvtax_fleet.standin.process import Standin, standin

pytestmark = pytest.mark.slow
IDLE = 10_000
MIB = 2**20


def test_the_memory_of_all_clients_has_a_budget(two, tmp_path):
    """Bodies sent ahead of an answer, long names, and blanks between token ids."""
    ahead = json.dumps(ask("x" * 30 * MIB)).encode()
    blanks = b'{"model": "null", "max_tokens": 1, "prompt": [7,%s1]}' % (b" " * 4 * MIB)
    for one in two:
        one.set_faults("hang")
    options = ("linear", "--max-held-bytes", str(48 * MIB))
    with proxy(tmp_path, named(two), *options) as on, ExitStack() as clients:
        before = resident_bytes(on.process.pid)
        for _ in range(4):
            client = clients.enter_context(connect(on.url, ask()))
            client.settimeout(0.5)
            with suppress(TimeoutError, ConnectionError):
                for _ in range(8):
                    client.sendall(post_head(on.url, len(ahead)) + ahead)
        for one in two:
            one.set_faults()
        for number in range(400):
            name = f"{number}" + "s" * 8000
            answer = post(on.url, ask(max_tokens=1), X_Session_Id=name)
            assert answer.status == 200
        for _ in range(8):
            post(on.url, blanks)
        # The budget, a request's copies while it is handled, and what allocators keep.
        assert resident_bytes(on.process.pid) - before < 2 * 48 * MIB
        assert max(one["cache"]["mirror_tokens"] for one in on.instances().values()) > (
            4 * MIB / 2048 * 64
        )
        assert len(on.get("/decisions?n=1000").body) < MIB


def post_head(url: str, length: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", 0, 400),
        ("1.1", 1, 200),
        ("1.1", 2, 400),
        ("1.0", 0, 200),
        ("1.0", 2, 400),
        ("0.9", 1, 505),
        ("2.0", 1, 505),
    ],
)
def test_a_request_names_one_host_and_a_version_that_is_served(
    started, tmp_path, version, hosts, status
):
    with proxy(tmp_path, named(started)) as on:
        at = urlsplit(on.url)
        lines = [
            f"GET /health HTTP/{version}",
            *["Host: h"] * hosts,
            "Connection: close",
        ]
        with socket.create_connection((at.hostname, at.port), DEADLINE_S) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode())
            assert int(client.recv(65536).split()[1]) == status


@pytest.mark.parametrize("host", ["a b", "http://a", "a@b", "a/b", "[::1", "a:b", "["])
def test_a_host_that_is_none_is_refused(started, tmp_path, host):
    with proxy(tmp_path, named(started)) as on:
        assert get(f"{on.url}/health", Host=host).status == 400
        for good in ("a", "", "a:80", "[::1]:80", "127.0.0.1", "a_b.c", "xn--a-.d"):
            assert get(f"{on.url}/health", Host=good).status == 200


def test_a_body_is_as_it_is_whichever_header_says_otherwise(started, tmp_path):
    with proxy(tmp_path, named(started)) as on, ExitStack() as clients:
        for lines, status in (
            (["Content-Encoding: identity", "Content-Encoding: gzip"], 415),
            (["Transfer-Encoding: gzip, chunked"], 501),
            (["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"], 501),
        ):
            head = ["POST /v1/completions HTTP/1.1", "Host: h", *lines]
            end = b"Content-Length: 2\r\n\r\n{}" if status == 415 else b"\r\n0\r\n\r\n"
            client = clients.enter_context(connection(on.url))
            client.sendall("".join(f"{line}\r\n" for line in head).encode() + end)
            assert int(client.recv(65536).split()[1]) == status


def connection(url: str) -> socket.socket:
    at = urlsplit(url)
    return socket.create_connection((at.hostname, at.port), DEADLINE_S)


@pytest.mark.parametrize("coding", ["gzip", "zstd", "gzip, zstd"])
def test_a_compressed_body_is_refused_for_what_it_is(started, tmp_path, coding):
    with proxy(tmp_path, named(started)) as on:
        refused = post(
            on.url, gzip.compress(b'{"prompt": [1]}'), Content_Encoding=coding
        )
        assert refused.status == 415 and coding in refused.error["message"]
        assert on.instances()["a"]["requests"] == 0
        assert post(on.url, ask(), Content_Encoding="identity").status == 200


def test_a_client_that_goes_away_aborts_the_request_at_the_instance(two, tmp_path):
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


def test_bad_bodies_get_4xx_and_reach_no_instance(two, tmp_path):
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


def cpu_s_of_requests(on: Proxy) -> float:
    """CPU seconds of the proxy for fifty requests: other processes do not change it."""

    def cpu_s() -> float:
        times = psutil.Process(on.process.pid).cpu_times()
        return times.user + times.system

    before_s = cpu_s()
    for _ in range(50):
        assert post(on.url, ask(max_tokens=1)).status == 200
    return cpu_s() - before_s


def test_ten_thousand_idle_connections_cost_little_and_hold_up_nobody(two, tmp_path):
    allow_open_files()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < IDLE + 1000:
        pytest.skip("too few files may be open")
    with proxy(tmp_path, named(two)) as on, ExitStack() as idle:
        alone_s = cpu_s_of_requests(on)
        before = resident_bytes(on.process.pid)
        at = urlsplit(on.url)
        for _ in range(IDLE):
            one = socket.create_connection((at.hostname, at.port), DEADLINE_S)
            idle.enter_context(one)
        assert post(on.url, ask()).status == 200  # so all have been accepted
        grown = resident_bytes(on.process.pid) - before
        assert grown < IDLE * 10_000, f"{grown} bytes"
        assert cpu_s_of_requests(on) < 2 * alone_s + 0.1


def test_a_slow_reader_holds_up_its_own_stream_and_takes_no_memory(tmp_path):
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


def test_a_client_that_stops_reading_is_cut_and_its_request_aborted(tmp_path):
    asked, options = ask(max_tokens=100_000), ("round_robin", "--client-timeout-s", "2")
    with standin() as one, proxy(tmp_path, named([one]), *options) as on:
        with connect(on.url, asked, X_Request_Id="stops") as client:
            first_event(client)
            assert on.instances()["a"]["requests"] == 1
            assert post(on.url, asked).body.endswith(DONE)
            end = on.end("stops")
            assert end["status"] == "client_gone"
            assert end["error"] == "the client took nothing for 2 s"
            assert end["generated_tokens"] < 100_000
            on.idle()
            until(
                lambda: one.metrics()["vllm:num_requests_running"] == 0,
                "the instance still works on it",
            )
        assert on.ejected() == []
        on.accounted(2)


TOKENS = 5
TEXT = " a" * TOKENS
SAID = [{"role": "user", "content": "What now?"}]
# What both kinds of clients raise for any status, and for an error event.
ERRORS = (openai.APIError, anthropic.APIError)
# And the helper for streams of responses, if the end is missing.
BROKEN = (*ERRORS, RuntimeError)


class Clients(NamedTuple):
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


def clients(url: str, **headers: str) -> Clients:
    """Clients that do not try again, and send these headers (_ for -)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    kept = {"api_key": "none", "max_retries": 0, "default_headers": named}
    return Clients(
        openai.OpenAI(base_url=f"{url}/v1", **kept),
        anthropic.Anthropic(base_url=url, **kept),
    )


class Said(NamedTuple):
    text: str
    output_tokens: int


def completion(by: Clients, prompt: str = "What now?") -> Said:
    answer = by.openai.completions.create(
        model="null", prompt=prompt, max_tokens=TOKENS
    )
    return Said(answer.choices[0].text, answer.usage.completion_tokens)


def completion_stream(by: Clients) -> Said:
    chunks = by.openai.completions.create(
        model="null",
        prompt="What now?",
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    *tokens, usage = chunks
    text = "".join(one.choices[0].text for one in tokens)
    return Said(text, usage.usage.completion_tokens)


def chat(by: Clients) -> Said:
    answer = by.openai.chat.completions.create(
        model="null", messages=SAID, max_completion_tokens=TOKENS
    )
    return Said(answer.choices[0].message.content, answer.usage.completion_tokens)


def chat_stream(by: Clients) -> Said:
    chunks = by.openai.chat.completions.create(
        model="null",
        messages=SAID,
        max_completion_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    *tokens, usage = chunks
    text = "".join(one.choices[0].delta.content or "" for one in tokens)
    return Said(text, usage.usage.completion_tokens)


def messages(by: Clients) -> Said:
    answer = by.anthropic.messages.create(
        model="null", messages=SAID, max_tokens=TOKENS
    )
    return Said(answer.content[0].text, answer.usage.output_tokens)


def messages_stream(by: Clients) -> Said:
    with by.anthropic.messages.stream(
        model="null", messages=SAID, max_tokens=TOKENS
    ) as stream:
        whole = stream.get_final_message()
    return Said(whole.content[0].text, whole.usage.output_tokens)


def responses(by: Clients) -> Said:
    answer = by.openai.responses.create(
        model="null", input="What now?", max_output_tokens=TOKENS
    )
    return Said(answer.output_text, answer.usage.output_tokens)


def responses_stream(by: Clients) -> Said:
    with by.openai.responses.stream(
        model="null", input="What now?", max_output_tokens=TOKENS
    ) as stream:
        whole = stream.get_final_response()
    return Said(whole.output_text, whole.usage.output_tokens)


Call = Callable[[Clients], Said]
WHOLE = [completion, chat, messages, responses]
STREAMS = [completion_stream, chat_stream, messages_stream, responses_stream]


@pytest.fixture(scope="module")
def on(
    started: list[Standin], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    with proxy(tmp_path_factory.mktemp("proxy"), named(started), "linear") as running:
        yield running


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy whose only instance is not there."""
    nobody = Instance("a", f"http://127.0.0.1:{free_port()}")
    with proxy(tmp_path_factory.mktemp("nowhere"), [nobody]) as running:
        yield running


def of(call: Call) -> str:
    return call.__name__


@pytest.mark.parametrize("call", WHOLE + STREAMS, ids=of)
def test_each_client_gets_the_answer_and_its_token_counts(on, call):
    assert call(clients(on.url, X_Request_Id=of(call))) == Said(TEXT, TOKENS)
    end = on.end(of(call))
    assert end["status"] == "ok"
    if call in STREAMS:
        # The usage of a completion or chat is an event, too, and so is a role.
        assert TOKENS <= end["generated_tokens"] <= TOKENS + 2
    on.idle()


def test_tokens_are_counted_before_a_message_is_sent(on):
    count = clients(on.url).anthropic.messages.count_tokens
    few = count(model="null", messages=SAID).input_tokens
    many = count(model="null", messages=SAID, system="Be brief. " * 40).input_tokens
    assert 0 < few < many - 90


@pytest.mark.parametrize("call", STREAMS, ids=of)
@pytest.mark.parametrize("fault", ["inband", "cut", "truncated"])
def test_no_client_takes_a_broken_stream_for_an_answer(on, call, fault):
    with pytest.raises(BROKEN):
        call(clients(on.url, X_Standin_Fault=fault))


@pytest.mark.parametrize("call", STREAMS, ids=of)
def test_a_stream_without_a_token_is_an_error_before_it_begins(on, call):
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
        call(clients(on.url, X_Standin_Fault="no_token"))


@pytest.mark.parametrize("call", WHOLE, ids=of)
def test_an_instances_refusal_is_passed_on(on, call):
    with pytest.raises(ERRORS, match="engine is dead") as raised:
        call(clients(on.url, X_Standin_Fault="http500"))
    assert raised.value.status_code == 500


@pytest.mark.parametrize("call", WHOLE + STREAMS, ids=of)
def test_the_proxys_own_errors_have_the_shape_of_the_api(nowhere, call):
    with pytest.raises(ERRORS) as raised:
        call(clients(nowhere.url))
    error = raised.value
    assert error.status_code == 503
    assert "no connection to a" in error.message
    if isinstance(error, anthropic.APIError):
        assert error.body["type"] == "error"
        assert error.body["error"]["type"] == "overloaded_error"
    else:
        # The client has taken `error` out of the body.
        assert error.body["type"] == error.type == "proxy_error"
        assert (error.code, error.param) == (503, None)


def test_a_body_that_is_too_large_is_said_so_in_each_shape(started, tmp_path):
    with proxy(tmp_path, named(started), "linear", "--max-body-bytes", "5000") as on:
        by, large = clients(on.url), "x" * 6000
        with pytest.raises(openai.APIStatusError, match="too large") as openais:
            completion(by, large)
        said = [{"role": "user", "content": large}]
        with pytest.raises(anthropic.APIStatusError, match="too large") as others:
            by.anthropic.messages.create(model="null", messages=said, max_tokens=1)
        assert openais.value.status_code == others.value.status_code == 413
        assert others.value.body["error"]["type"] == "request_too_large"
