# SPDX-License-Identifier: Apache-2.0
"""HTTP towards clients: what is asked is understood, and what is no HTTP refused."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from http_lab import LIMIT_BYTES, ask, echo, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from fleet.proxy.http.request import Request

CHUNKED = (
    b"POST /chunks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nwiki\r\n5;x=y\r\npedia\r\n0\r\nTrailer: t\r\n\r\n"
)
SENT = ask(b"hello") + CHUNKED + b"\r\nGET /g HTTP/1.1\r\nHost: h\r\n\r\n" + ask(b"x")
SAID = [("/a", "hello"), ("/chunks", "wikipedia"), ("/g", ""), ("/a", "x")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, len(SENT)), max_size=5))
def test_requests_are_answered_in_turn_however_tcp_cuts_them(cuts: list[int]) -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            for start, end in zip(
                [0, *sorted(cuts)], [*sorted(cuts), None], strict=True
            ):
                wire.send(SENT[start:end])
                await asyncio.sleep(0.001)
            answers = [(await wire.answer())[1] for _ in SAID]
            assert [(one["path"], one["body"]) for one in answers] == SAID
            assert (answers[0]["method"], answers[0]["query"]) == ("POST", "b=c")
            headers = [one["headers"] for one in answers]
            sized = ["Content-Length", "Host"]
            assert headers == [sized, ["Transfer-Encoding"], ["Host"], sized]

    uvloop.run(scenario())


def test_a_connection_that_sends_far_ahead_is_read_no_further_than_answered() -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(*(ask(b"%d" % n) for n in range(500)))
            for n in range(500):
                assert (await wire.answer())[1]["body"] == str(n)

    uvloop.run(scenario())


def test_only_a_head_counts_as_one() -> None:
    async def scenario() -> None:
        async with serving(max_body_bytes=10**6) as dial:
            wire = await dial()
            wire.send(ask() * 1500, ask()[:20])  # nor what came before it
            await asyncio.sleep(0.05)
            wire.send(ask()[20:], ask(b"x" * 10**6))
            for _ in range(1502):
                assert (await wire.answer())[0] == 200

    uvloop.run(scenario())


def test_who_sends_ahead_and_reads_nothing_is_answered_no_further() -> None:
    handled = 0

    async def large(request: Request) -> None:
        nonlocal handled
        handled += 1
        request.whole(200, CIMultiDict(), b" " * 499_999 + b"0")

    async def scenario() -> None:
        async with serving(large) as dial:
            wire = await dial()
            wire.send(ask() * 60)
            await asyncio.sleep(0.3)
            assert 0 < handled < 40
            for _ in range(60):
                assert await wire.answer() == (200, 0)

    uvloop.run(scenario())


def test_nothing_follows_an_answer_but_the_next_one() -> None:
    """The proxy may be stopped, or a prefill be given up, at any moment."""

    async def wordy(request: Request) -> None:
        await echo(request)
        request.whole(503, CIMultiDict(), b"too late")
        request.write(b"too late")
        request.end(b"too late")

    async def scenario() -> None:
        async with serving(wordy) as dial:
            wire = await dial()
            wire.send(ask(path="/stream"), ask(b"next", "Connection: close"))
            assert (await wire.head())[0] == 200
            await wire.reader.readuntil(b"three\r\n0\r\n\r\n")
            assert (await wire.answer())[1]["body"] == "next"
            assert await wire.rest() == b""

    uvloop.run(scenario())


def test_a_stream_comes_in_chunks_and_to_http_1_0_until_the_end() -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(ask(path="/stream"), ask(b"next", "Connection: close"))
            status, headers = await wire.head()
            assert (status, headers["Transfer-Encoding"]) == (200, "chunked")
            whole = await wire.rest()
            chunks = b"4\r\none,\r\n4\r\ntwo,\r\n5\r\nthree\r\n0\r\n\r\n"
            assert whole.startswith(chunks)
            assert b'"body": "next"' in whole.removeprefix(chunks)
            old = await dial()
            old.send(b"GET /stream HTTP/1.0\r\n\r\n")
            assert "Transfer-Encoding" not in (await old.head())[1]
            assert await old.rest() == b"one,two,three"

    uvloop.run(scenario())


def test_head_gets_the_head_and_expect_is_told_to_go_on() -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(b"HEAD /h HTTP/1.1\r\nHost: h\r\n\r\n")
            status, headers = await wire.head()
            assert status == 200
            assert int(headers["Content-Length"]) > 0
            asked = ask(b"body", "Expect: 100-continue")
            wire.send(asked[:-4])
            assert (await wire.head())[0] == 100
            wire.send(asked[-4:])
            assert (await wire.answer())[1]["body"] == "body"
            # But not into another answer.
            wire.send(ask(path="/stream"), ask(b"b", "Expect: 100-continue"))
            whole = await wire.reader.readuntil(b'"over": null')
            assert b"100 Continue" not in whole

    uvloop.run(scenario())


def test_a_target_may_be_a_whole_url() -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(b"GET http://elsewhere:80/v1/models?a=b HTTP/1.1\r\n\r\n")
            said = (await wire.answer())[1]
            assert (said["path"], said["query"]) == ("/v1/models", "a=b")

    uvloop.run(scenario())


def test_a_body_is_read_also_where_another_protocol_is_offered() -> None:
    """As Java's HTTP client does it with each first request."""
    lines = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x"

    async def scenario() -> None:
        async with serving() as dial:
            for cut in (1, 30, 120, 150):
                wire = await dial()
                asked = ask(b"upgrade me", *lines)
                wire.send(asked[:-cut])
                await asyncio.sleep(0.01)
                wire.send(asked[-cut:])
                assert (await wire.answer())[1]["body"] == "upgrade me"

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"
            b"\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n smuggled: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 400_000, 431),
        (b"GET /" + b"x" * 400_000, 431),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (CHUNKED.partition(b"4\r\n")[0] + b"0\r\nT: " + b"x" * 400_000, 431),
        (CHUNKED.partition(b"4\r\n")[0] + b"4;a=" + b"x" * 400_000, 431),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(
    sent: bytes, status: int
) -> None:
    async def never(_: Request) -> None:
        raise AssertionError

    async def scenario() -> None:
        async with serving(never) as dial:
            wire = await dial()
            wire.send(sent)
            assert (await wire.head())[0] == status
            await wire.rest()

    uvloop.run(scenario())


def test_too_large_a_body_is_known_before_it_is_here() -> None:
    announced = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % 2**30
    endless = CHUNKED.partition(b"4\r\n")[0] + b"40000000\r\n" + b"x" * 2 * LIMIT_BYTES

    async def scenario() -> None:
        async with serving() as dial:
            for sent in (announced, endless):
                wire = await dial()
                wire.send(sent)
                status, said = await wire.answer()
                assert (status, said["over"]) == (200, LIMIT_BYTES)
                assert await wire.rest() == b""

    uvloop.run(scenario())


def test_a_client_that_is_still_sending_gets_to_read_its_refusal() -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(ask(b"x" * 3_000_000))
            assert (await wire.answer())[1]["over"] == LIMIT_BYTES

    uvloop.run(scenario())
