# SPDX-License-Identifier: Apache-2.0
"""Clients of the APIs get the answers that they expect."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    named,
    post,
    proxy,
    resident_bytes,
    until,
)
from kvtax.load import allow_open_files
from tests.harness.standin.process import Standin, standin

from kvtax_fleet.records.instances import Instance

pytestmark = pytest.mark.slow
IDLE = 10_000
MIB = 2**20


def test_names_and_blanks_take_little_memory(two, tmp_path):
    blanks = b'{"model": "null", "max_tokens": 1, "prompt": [7,%s1]}' % (b" " * 4 * MIB)
    with proxy(tmp_path, named(two), "linear") as on:
        before = resident_bytes(on.process.pid)
        for number in range(400):
            name = f"{number}" + "s" * 8000
            answer = post(on.url, ask(max_tokens=1), X_Session_Id=name)
            assert answer.status == 200
        for _ in range(8):
            post(on.url, blanks)
        assert resident_bytes(on.process.pid) - before < 64 * MIB
        assert max(one["cache"]["mirror_tokens"] for one in on.instances().values()) > (
            4 * MIB / 2048 * 64
        )
        assert len(on.get("/decisions?n=1000").body) < MIB


@contextmanager
def large_answers(pieces: int) -> Iterator[tuple[str, threading.Event]]:
    """An instance whose answer is `pieces` of a MiB; each but the first when told."""
    go_on = threading.Event()

    class Large(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(pieces * MIB))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(b'{"choices": [' + b" " * (MIB - 13))
                go_on.wait(DEADLINE_S)
                for _ in range(pieces - 1):
                    self.wfile.write(b" " * MIB)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Large) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", go_on
        go_on.set()
        server.shutdown()


def test_an_answer_is_passed_on_as_it_comes_and_kept_for_no_slow_reader(tmp_path):
    whole = ask(stream=False)
    with (
        large_answers(40) as (url, go_on),
        proxy(tmp_path, [Instance("a", url)]) as on,
        ExitStack() as clients,
    ):
        before = resident_bytes(on.process.pid)
        first = clients.enter_context(connect(on.url, whole))
        assert b"200 OK" in first.recv(65536)
        go_on.set()
        slow = [clients.enter_context(connect(on.url, whole)) for _ in range(7)]
        time.sleep(3)
        assert resident_bytes(on.process.pid) - before < 32 * MIB
        for client in (first, *slow):
            client.close()
        on.idle()


def test_the_bodies_of_all_clients_have_a_budget(tmp_path):
    large = ask("x" * 8 * MIB)
    options = ("linear", "--max-held-bytes", str(64 * MIB))
    with (
        large_answers(2) as (url, _),
        proxy(tmp_path, [Instance("a", url)], *options) as on,
        ExitStack() as clients,
    ):
        before = resident_bytes(on.process.pid)
        waiting = [clients.enter_context(connect(on.url, large)) for _ in range(8)]
        statuses = [client.recv(12) for client in waiting]
        assert statuses.count(b"HTTP/1.1 503") >= 6
        assert resident_bytes(on.process.pid) - before < 64 * MIB
        for client in waiting:
            client.close()
        on.idle()
        with connect(on.url, large) as later:
            assert later.recv(12) == b"HTTP/1.1 200"


def test_a_compressed_body_is_read_and_a_bomb_is_too_large(started, tmp_path):
    options = ("linear", "--max-body-bytes", str(MIB))
    with proxy(tmp_path, named(started), *options) as on:
        raw = json.dumps(ask()).encode()
        assert post(on.url, gzip.compress(raw), Content_Encoding="gzip").status == 200
        bomb = gzip.compress(json.dumps(ask("x" * 64 * MIB)).encode())
        assert post(on.url, bomb, Content_Encoding="gzip").status == 413


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
