# SPDX-License-Identifier: Apache-2.0
"""Clients of the APIs get the answers that they expect."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import openai
import pytest
from fleet.tests.proxy.proxy_lab import (
    Proxy,
    ask,
    connect,
    first_event,
    named,
    post,
    proxy,
    resident_bytes,
    until,
)
from tests.harness.standin.process import Standin, standin

pytestmark = pytest.mark.slow
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
        mirrored = [each["cache"]["mirror_tokens"] for each in on.instances().values()]
        assert max(mirrored) < 1_000, "blanks count as tokens"
        assert len(on.get("/decisions?n=1000").body) < MIB


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
        assert on.out() == []


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
        assert unknown.status == 404  # the instance's own answer
        assert on.out() == []
        on.idle()


def test_a_slow_reader_holds_up_its_own_stream_and_takes_no_memory(tmp_path):
    # 100,000 tokens are about 18 MB of events.
    asked = ask(max_tokens=100_000)
    with standin() as each, proxy(tmp_path, named([each])) as on:
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


TOKENS = 5
TEXT = " a" * TOKENS
SAID = [{"role": "user", "content": "What now?"}]


def client(url: str, **headers: str) -> openai.OpenAI:
    """A client that does not try again, and sends these headers (_ for -)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers=named
    )


class Said(NamedTuple):
    text: str
    output_tokens: int


def completion(by: openai.OpenAI, prompt: str = "What now?") -> Said:
    answer = by.completions.create(model="null", prompt=prompt, max_tokens=TOKENS)
    return Said(answer.choices[0].text, answer.usage.completion_tokens)


def completion_stream(by: openai.OpenAI) -> Said:
    chunks = by.completions.create(
        model="null",
        prompt="What now?",
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    *tokens, usage = chunks
    text = "".join(each.choices[0].text for each in tokens)
    return Said(text, usage.usage.completion_tokens)


def chat(by: openai.OpenAI) -> Said:
    answer = by.chat.completions.create(
        model="null", messages=SAID, max_completion_tokens=TOKENS
    )
    return Said(answer.choices[0].message.content, answer.usage.completion_tokens)


def chat_stream(by: openai.OpenAI) -> Said:
    chunks = by.chat.completions.create(
        model="null",
        messages=SAID,
        max_completion_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    *tokens, usage = chunks
    text = "".join(each.choices[0].delta.content or "" for each in tokens)
    return Said(text, usage.usage.completion_tokens)


Call = Callable[[openai.OpenAI], Said]
WHOLE = [completion, chat]
STREAMS = [completion_stream, chat_stream]


@pytest.fixture(scope="module")
def on(
    started: list[Standin], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    with proxy(tmp_path_factory.mktemp("proxy"), named(started), "linear") as running:
        yield running


def of(call: Call) -> str:
    return call.__name__


@pytest.mark.parametrize("call", WHOLE + STREAMS, ids=of)
def test_each_client_gets_the_answer_and_its_token_counts(on, call):
    assert call(client(on.url, X_Request_Id=of(call))) == Said(TEXT, TOKENS)
    end = on.end(of(call))
    assert end["status"] == "ok"
    if call in STREAMS:
        # The usage of a completion or chat is an event, too, and so is a role.
        assert TOKENS <= end["generated_tokens"] <= TOKENS + 2
    on.idle()


@pytest.mark.parametrize("call", STREAMS, ids=of)
@pytest.mark.parametrize("fault", ["inband", "cut", "truncated"])
def test_no_client_takes_a_broken_stream_for_an_answer(on, call, fault):
    with pytest.raises(openai.APIError):
        call(client(on.url, X_Standin_Fault=fault))


@pytest.mark.parametrize("call", STREAMS, ids=of)
def test_a_stream_without_a_token_is_an_error_before_it_begins(on, call):
    with pytest.raises(openai.InternalServerError):
        call(client(on.url, X_Standin_Fault="no_token"))


@pytest.mark.parametrize("call", WHOLE, ids=of)
def test_an_instances_refusal_is_passed_on(on, call):
    with pytest.raises(openai.APIStatusError, match="engine is dead") as raised:
        call(client(on.url, X_Standin_Fault="http500"))
    assert raised.value.status_code == 500
