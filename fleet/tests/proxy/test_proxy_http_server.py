# SPDX-License-Identifier: Apache-2.0
"""The proxy reads HTTP as other servers do, and bounds what a client can cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from fleet.tests.proxy.proxy_lab import DEADLINE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvtax_fleet.proxy import http_server as server
from kvtax_fleet.proxy.http_server import Handle, Request, Server

LIMIT_BYTES = 1000
TOO_LARGE = [413, f"the body is too large: at most {LIMIT_BYTES} bytes"]
HELD_BYTES = 2**30
MIB = 2**20
Dial = Callable[[], Awaitable["Wire"]]


async def echo(request: Request) -> None:
    """Says what it was asked; a path of its own asks for a stream."""
    said = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "body": request.body.decode("latin-1"),
        "refusal": request.refusal,
        "headers": sorted(request.headers),
    }
    kind = CIMultiDict({"Content-Type": "application/json"})
    if request.path != "/stream":
        request.whole(200, kind, json.dumps(said).encode())
        return
    request.begin(200, kind)
    for piece in (b"one,", b"", b"two,"):
        request.write(piece)
        await asyncio.sleep(0)
    request.end(b"three")


class Wire:
    """A client that sends and reads bytes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().strip().split("\r\n")
        named = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), dict(named)

    async def answer(self) -> tuple[int, dict]:
        """Status and JSON of an answer that is not a stream."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["Content-Length"]))
        return status, json.loads(body)

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    async def is_gone(self) -> None:
        """Returns once the server has ended the connection in the middle."""
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await self.answer()


@asynccontextmanager
async def serving(
    handle: Handle = echo,
    client_timeout_s: float = DEADLINE_S,
    max_body_bytes: int = LIMIT_BYTES,
    max_held_bytes: int = HELD_BYTES,
) -> AsyncIterator[Dial]:
    serves = Server(handle, max_body_bytes, max_held_bytes, client_timeout_s)
    listening = await serves.listen("127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    sweeping = asyncio.create_task(serves.sweep_forever())
    wires: list[Wire] = []

    async def dial() -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", port)))
        return wires[-1]

    try:
        yield dial
    finally:
        for wire in wires:
            wire.writer.close()
        sweeping.cancel()
        listening.close()
        await serves.close()
        assert serves.connections == set()
        assert serves.held_bytes == 0


def ask(body: bytes = b"", *lines: str, path: str = "/a?b=c") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


CHUNKED = (
    b"POST /chunks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nwiki\r\n5;x=y\r\npedia\r\n0\r\nTrailer: t\r\n\r\n"
)
SENT = ask(b"hello") + CHUNKED + b"\r\nGET /g HTTP/1.1\r\nHost: h\r\n\r\n" + ask(b"x")
SAID = [("/a", "hello"), ("/chunks", "wikipedia"), ("/g", ""), ("/a", "x")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, len(SENT)), max_size=5))
def test_requests_are_answered_in_turn_however_tcp_cuts_them(cuts):
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


async def test_a_connection_that_sends_far_ahead_is_read_no_further_than_answered():
    async with serving() as dial:
        wire = await dial()
        wire.send(*(ask(b"%d" % n) for n in range(500)))
        for n in range(500):
            assert (await wire.answer())[1]["body"] == str(n)


async def test_bodies_sent_ahead_are_read_when_their_turn_comes():
    held, going_on = 0, asyncio.Event()

    async def slow(request: Request) -> None:
        nonlocal held
        await going_on.wait()
        held = max(held, request.connection._server.held_bytes)
        await echo(request)

    async with serving(slow, max_body_bytes=MIB, max_held_bytes=5 * MIB) as dial:
        wire = await dial()
        wire.send(*(ask(b"x" * MIB) for _ in range(10)))
        await asyncio.sleep(0.2)
        going_on.set()
        for _ in range(10):
            assert (await wire.answer())[1]["refusal"] is None
        assert held < 2 * MIB


async def test_of_all_clients_the_largest_body_is_refused_and_small_ones_find_room():
    async with serving(max_body_bytes=9 * MIB, max_held_bytes=10 * MIB) as dial:
        wires = [await dial() for _ in range(3)]
        for wire, part in zip(wires, (2, 6, 3), strict=True):
            wire.send(ask(b"x" * 8 * MIB)[: part * MIB])
            await asyncio.sleep(0.2)
        status, reason = (await wires[1].answer())[1]["refusal"]
        assert (status, "full of requests" in reason) == (503, True)
        small = await dial()
        small.send(ask(b"x"))
        assert (await small.answer())[1]["body"] == "x"


async def test_only_a_head_counts_as_one():
    async with serving(max_body_bytes=10**6) as dial:
        wire = await dial()
        wire.send(ask() * 1500, ask()[:20])  # nor what came before it
        await asyncio.sleep(0.05)
        wire.send(ask()[20:], ask(b"x" * 10**6))
        for _ in range(1502):
            assert (await wire.answer())[0] == 200


async def test_who_sends_ahead_and_reads_nothing_is_answered_no_further():
    handled = 0

    async def large(request: Request) -> None:
        nonlocal handled
        handled += 1
        request.whole(200, CIMultiDict(), b" " * 499_999 + b"0")

    async with serving(large) as dial:
        wire = await dial()
        wire.send(ask() * 60)
        async with asyncio.timeout(DEADLINE_S):
            while not handled:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert handled < 40
        for _ in range(60):
            assert await wire.answer() == (200, 0)


async def test_nothing_follows_an_answer_but_the_next_one():
    """The proxy may be stopped, or a prefill be given up, at any moment."""

    async def wordy(request: Request) -> None:
        await echo(request)
        request.whole(503, CIMultiDict(), b"too late")
        request.write(b"too late")
        request.end(b"too late")

    async with serving(wordy) as dial:
        wire = await dial()
        wire.send(ask(path="/stream"), ask(b"next", "Connection: close"))
        assert (await wire.head())[0] == 200
        await wire.reader.readuntil(b"three\r\n0\r\n\r\n")
        assert (await wire.answer())[1]["body"] == "next"
        assert await wire.rest() == b""


async def test_a_stream_comes_in_chunks_and_to_http_1_0_until_the_end():
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


async def test_head_gets_the_head_and_expect_is_told_to_go_on():
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
        whole = await wire.reader.readuntil(b'"refusal": null')
        assert b"100 Continue" not in whole


async def test_a_target_may_be_a_whole_url():
    async with serving() as dial:
        wire = await dial()
        wire.send(b"GET http://elsewhere:80/v1/models?a=b HTTP/1.1\r\n\r\n")
        said = (await wire.answer())[1]
        assert (said["path"], said["query"]) == ("/v1/models", "a=b")


async def test_a_body_is_read_also_where_another_protocol_is_offered():
    """As Java's HTTP client does it with each first request."""
    lines = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: x"

    async with serving() as dial:
        for cut in (1, 30, 120, 150):
            wire = await dial()
            asked = ask(b"upgrade me", *lines)
            wire.send(asked[:-cut])
            await asyncio.sleep(0.01)
            wire.send(asked[-cut:])
            assert (await wire.answer())[1]["body"] == "upgrade me"


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
async def test_what_is_no_request_is_refused_and_the_connection_ends(sent, status):
    async def never(_: Request) -> None:
        raise AssertionError

    async with serving(never) as dial:
        wire = await dial()
        wire.send(sent)
        assert (await wire.head())[0] == status
        await wire.rest()


async def test_too_large_a_body_is_known_before_it_is_here():
    announced = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % 2**30
    endless = CHUNKED.partition(b"4\r\n")[0] + b"40000000\r\n" + b"x" * 2 * LIMIT_BYTES

    async with serving() as dial:
        for sent in (announced, endless):
            wire = await dial()
            wire.send(sent)
            status, said = await wire.answer()
            assert (status, said["refusal"]) == (200, TOO_LARGE)
            assert await wire.rest() == b""


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("filler", [b"A: %b\r\n", b"B: b\r\n%b: c\r\n"])
async def test_a_long_head_is_refused_however_it_arrives(in_pieces, filler):
    head, body = ask(b"x").split(b"\r\n\r\n")
    too_long = filler % (b"a" * 70_000)
    async with serving() as dial:
        wire = await dial()
        sent = b"\r\n".join([head, too_long, body]) + ask(b"and another")
        step = 4000 if in_pieces else len(sent)
        for start in range(0, len(sent), step):
            wire.send(sent[start : start + step])
            await asyncio.sleep(0.001)
        assert (await wire.head())[0] == 431
        assert b"HTTP/1.1" not in await wire.rest()
        wire = await dial()
        wire.send(b"\r\n".join([head, filler % (b"a" * 60_000), body]))
        assert (await wire.answer())[0] == 200


@pytest.mark.parametrize("path", ["/a", "/stream"])
async def test_a_client_that_ends_its_side_gets_all_of_its_answers(soon, path):
    begun = asyncio.Event()

    async def slow(request: Request) -> None:
        begun.set()
        await asyncio.sleep(20 * server.SWEEP_EVERY_S)
        await echo(request)

    async with serving(slow) as dial:
        wire = await dial()
        wire.send(ask(b"1", path=path), ask(b"2", path=path))
        await begun.wait()
        wire.writer.write_eof()
        got = await wire.rest()
        assert got.count(b"HTTP/1.1 200 OK") == 2
        last = b"three\r\n0\r\n\r\n" if path == "/stream" else b"}"
        assert got.endswith(last)
        assert got.count(server.CONTINUE) == 1


async def test_a_client_that_ends_its_side_in_a_request_is_cut():
    async with serving() as dial:
        wire = await dial()
        wire.send(ask(b"1234567")[:-3])
        wire.writer.write_eof()
        assert await wire.rest() == b""


async def test_a_client_that_is_still_sending_gets_to_read_its_refusal():
    async with serving() as dial:
        wire = await dial()
        wire.send(ask(b"x" * 3_000_000))
        assert (await wire.answer())[1]["refusal"] == TOO_LARGE


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as impatient."""
    monkeypatch.setattr(server, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    monkeypatch.setattr(server, "KEEPALIVE_S", 0.3)
    monkeypatch.setattr(server, "LINGER_S", 0.1)


@pytest.mark.parametrize(
    "begun", [b"P", b"POST / HTTP/1.1\r\nA: b\r\n", ask(b"1234567")[:-3]]
)
async def test_who_sends_a_request_too_slowly_is_told_and_cut(soon, begun):
    async def drip(wire: Wire) -> None:
        while True:
            wire.send(b"a")
            await asyncio.sleep(0.05)

    async with serving() as dial:
        wire = await dial()
        wire.send(begun)
        if begun.endswith(b"\n"):
            dripping = asyncio.create_task(drip(wire))
        assert (await wire.head())[0] == 408
        await wire.rest()
        if begun.endswith(b"\n"):
            dripping.cancel()


async def test_who_sends_slowly_but_steadily_is_waited_for(soon, monkeypatch):
    monkeypatch.setattr(server, "MIN_BYTES_PER_S", 50)
    async with serving() as dial:
        wire = await dial()
        asked = ask(b"x" * 900)
        wire.send(asked[:-900])
        for _ in range(9):
            wire.send(b"x" * 100)  # at 2,000 bytes per second
            await asyncio.sleep(0.05)
        assert (await wire.answer())[1]["body"] == "x" * 900


@pytest.mark.slow
async def test_idle_connections_end_and_those_that_are_answered_do_not(soon):
    goes_on = asyncio.Event()

    async def slow(request: Request) -> None:
        await goes_on.wait()
        await echo(request)

    async with serving(slow) as dial:
        idle, busy = await dial(), await dial()
        busy.send(ask(b"still here"))
        assert await idle.rest() == b""
        await asyncio.sleep(0.5)
        goes_on.set()
        assert (await busy.answer())[1]["body"] == "still here"
        assert await busy.rest() == b""


@pytest.mark.slow
async def test_handling_ends_with_the_client_and_a_failure_with_the_connection():
    gone, asked = asyncio.Event(), asyncio.Event()

    async def handle(request: Request) -> None:
        if request.path == "/fails":
            raise ValueError("on purpose")
        asked.set()
        try:
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            gone.set()
            raise

    async with serving(handle) as dial, asyncio.timeout(DEADLINE_S):
        wire = await dial()
        wire.send(ask())
        await asked.wait()
        wire.writer.close()
        await gone.wait()
        fails = await dial()
        fails.send(ask(path="/fails"))
        await fails.is_gone()


async def megabytes(request: Request) -> None:
    request.whole(200, CIMultiDict(), b"1" * 24_000_000)


@pytest.mark.slow
async def test_an_answer_is_sent_to_its_end_however_slowly_it_is_taken(soon):
    async with serving(megabytes, client_timeout_s=1) as dial:
        for lines in ((), ("Connection: close",)):
            wire = await dial()
            wire.send(ask(b"", *lines))
            await wire.head()
            for _ in range(24):
                await asyncio.sleep(0.05)
                await wire.reader.readexactly(1_000_000)


@pytest.mark.slow
async def test_who_takes_nothing_of_an_answer_is_cut(soon):
    requests: list[Request] = []

    async def handle(request: Request) -> None:
        requests.append(request)
        await megabytes(request)

    async with serving(handle, client_timeout_s=0.2) as dial:
        wire = await dial()
        wire.send(ask())
        async with asyncio.timeout(DEADLINE_S):
            while not (requests and requests[0].connection._transport.is_closing()):
                await asyncio.sleep(0.01)
        await wire.is_gone()


async def test_a_server_that_ends_answers_what_it_has_been_asked(soon):
    asked = asyncio.Event()

    async def slow(request: Request) -> None:
        asked.set()
        await asyncio.sleep(0.05)
        await echo(request)

    serves = Server(slow, LIMIT_BYTES, HELD_BYTES, DEADLINE_S)
    listening = await serves.listen("127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    wire, idle = [
        Wire(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)
    ]
    wire.send(ask(b"last"))
    await asked.wait()
    listening.close()
    ending = asyncio.create_task(serves.close())
    assert (await wire.answer())[1]["body"] == "last"
    assert await wire.rest() == await idle.rest() == b""
    for one in (wire, idle):
        one.writer.close()
    await ending
    assert serves.connections == set()
