# SPDX-License-Identifier: Apache-2.0
"""OpenAI's and Anthropic's own clients, through the proxy: answers, streams, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import anthropic
import openai
import pytest
from proxy_lab import Proxy, free_port, named, proxy

from fleet.standin.process import Standin
from lab.records.instances import Instance

pytestmark = pytest.mark.slow

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
def test_each_client_gets_the_answer_and_its_token_counts(
    on: Proxy, call: Call
) -> None:
    assert call(clients(on.url, X_Request_Id=of(call))) == Said(TEXT, TOKENS)
    end = on.end(of(call))
    assert end["status"] == "ok"
    if call in STREAMS:
        # The usage of a completion or chat is an event, too, and so is a role.
        assert TOKENS <= end["generated_tokens"] <= TOKENS + 2
    on.idle()


def test_tokens_are_counted_before_a_message_is_sent(on: Proxy) -> None:
    count = clients(on.url).anthropic.messages.count_tokens
    few = count(model="null", messages=SAID).input_tokens
    many = count(model="null", messages=SAID, system="Be brief. " * 40).input_tokens
    assert 0 < few < many - 90


@pytest.mark.parametrize("call", STREAMS, ids=of)
@pytest.mark.parametrize("fault", ["inband", "cut", "truncated"])
def test_no_client_takes_a_broken_stream_for_an_answer(
    on: Proxy, call: Call, fault: str
) -> None:
    with pytest.raises(BROKEN):
        call(clients(on.url, X_Standin_Fault=fault))


@pytest.mark.parametrize("call", STREAMS, ids=of)
def test_a_stream_without_a_token_is_an_error_before_it_begins(
    on: Proxy, call: Call
) -> None:
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
        call(clients(on.url, X_Standin_Fault="no_token"))


@pytest.mark.parametrize("call", WHOLE, ids=of)
def test_an_instances_refusal_is_passed_on(on: Proxy, call: Call) -> None:
    with pytest.raises(ERRORS, match="engine is dead") as raised:
        call(clients(on.url, X_Standin_Fault="http500"))
    assert raised.value.status_code == 500


@pytest.mark.parametrize("call", WHOLE + STREAMS, ids=of)
def test_the_proxys_own_errors_have_the_shape_of_the_api(
    nowhere: Proxy, call: Call
) -> None:
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


def test_a_body_that_is_too_large_is_said_so_in_each_shape(
    started: list[Standin], tmp_path: Path
) -> None:
    with proxy(tmp_path, named(started), "linear", "--max-body-bytes", "5000") as on:
        by, large = clients(on.url), "x" * 6000
        with pytest.raises(openai.APIStatusError, match="too large") as openais:
            completion(by, large)
        said = [{"role": "user", "content": large}]
        with pytest.raises(anthropic.APIStatusError, match="too large") as others:
            by.anthropic.messages.create(model="null", messages=said, max_tokens=1)
        assert openais.value.status_code == others.value.status_code == 413
        assert others.value.body["error"]["type"] == "request_too_large"
