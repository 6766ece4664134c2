# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, the proxy reads it as others do, however TCP cuts it.

A case is a message that may be changed in a few places. FUZZ_CASES=2500000 has ten
million of them; a failure names the case, which is the seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import h11
import msgspec
import pytest
from multidict import CIMultiDict

from kvtax_fleet.proxy import http_client as connections
from kvtax_fleet.proxy import http_server as listener
from kvtax_fleet.proxy.apis import (
    APIS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    UNREADABLE,
)
from kvtax_fleet.proxy.body import Body, BodyError, Fields, top_level
from kvtax_fleet.proxy.core import relay
from kvtax_fleet.proxy.exchange import error_event
from kvtax_fleet.proxy.http_client import BrokenOff
from kvtax_fleet.proxy.http_server import Request
from kvtax_fleet.proxy.loads import FleetLoad
from kvtax_fleet.proxy.upstream import Failure, Lost, forwarded
from kvtax_fleet.records.decisions import DecisionEnd

Check = Callable[[random.Random], Awaitable[None]]


def changed(chance: random.Random, data: bytes, splices: Sequence[bytes]) -> bytes:
    """The bytes with up to four changes; as they are, for one in four."""
    made = bytearray(data)
    for _ in range(chance.choice((0, 1, 2, 4))):
        place = chance.randrange(len(made) + 1)
        splice = chance.choice((chance.randbytes(1), *splices))
        made[place : place + chance.randrange(4)] = splice
    return bytes(made)


def cut(chance: random.Random, data: bytes) -> list[bytes]:
    """The bytes in up to five pieces, of which none is empty."""
    places = {chance.randrange(len(data) + 1) for _ in range(chance.randrange(5))}
    places = sorted({0, *places, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


class Socket:
    """A transport that keeps what is written, and refuses what a real one refuses."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.ended
        self.written += data

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.write(b"".join(pieces))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert not self.aborted
        self.ended = True

    def abort(self) -> None:
        self.ended = self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        assert not self.aborted
        return 0

    def pause_reading(self) -> None:
        assert not self.aborted

    resume_reading = pause_reading


LIMIT_BYTES = 64
HELD_BYTES = 2**30
URL = "http://instance:1"
LINES = [b"\r\n", b"\n", b"\r", b" ", b":", b"\0", b"\x80", b"\r\n ", b"\r\n\r\n", b"0"]
HEADERS = [
    b"Content-Length: 3",
    b"Content-Length: 80",
    b"Transfer-Encoding: chunked",
    b"Connection: close",
    b"Connection: Upgrade, X-A",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"X-A: b",
    b"Host: h",
]
SPLICES = [*LINES, *(line + b"\r\n" for line in HEADERS)]
BODIES = [
    b"",
    b"abc",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"5;a=b\r\nhello\r\n0\r\nT: u\r\n\r\n",
    b"50\r\n" + b"x" * 80 + b"\r\n0\r\n\r\n",
]
ASKED = [b"POST /a?b=c HTTP/1.1", b"GET /g HTTP/1.1", b"HEAD / HTTP/1.0"]
SAID = [b"HTTP/1.1 200 OK", b"HTTP/1.1 204 No Content", b"HTTP/1.1 100 Continue"]


def message(chance: random.Random, first_lines: list[bytes]) -> bytes:
    lines = [chance.choice(first_lines), *chance.sample(HEADERS, chance.randrange(4))]
    return b"\r\n".join([*lines, b"", chance.choice(BODIES)])


async def handled(pieces: list[bytes]) -> list[Request]:
    """The requests that come in these pieces; each has been answered."""
    requests = []

    async def handle(request: Request) -> None:
        requests.append(request)
        request.whole(200, CIMultiDict(), b"ok")

    socket = Socket()
    connection = listener._Connection(
        listener.Server(handle, LIMIT_BYTES, HELD_BYTES, 1)
    )
    connection.connection_made(socket)
    for piece in pieces:
        connection.data_received(piece)
        while connection._current is not None:
            await asyncio.sleep(0)
    connection.connection_lost(None)
    assert socket.written.count(b"HTTP/1.1 200 OK") == len(requests)
    return requests


def facts(request: Request) -> list[Any]:
    whole = request.body if request.refusal is None else None
    headers = list(request.headers.items())
    return [request.method, request.path, request.query, headers, whole]


def sent_to_instance(request: Request) -> bytes:
    socket, pool = Socket(), connections.Pool(1, 1, 1)
    connection = connections._Connection(pool, connections.place_of(URL))
    connection.connection_made(socket)
    pool.keep(connection)
    asking = pool.request("POST", URL, "/a", forwarded(request.headers), request.body)
    asking.send(None)
    asking.close()
    return socket.written


async def check_requests(chance: random.Random) -> None:
    """They are the same ones in any pieces, and one each for the instance's parser."""
    several = (message(chance, ASKED) for _ in range(chance.randrange(1, 4)))
    data = changed(chance, b"".join(several), SPLICES)

    requests = await handled([data])
    in_pieces = await handled(cut(chance, data))
    assert list(map(facts, in_pieces)) == list(map(facts, requests))
    for request in requests:
        other = h11.Connection(h11.SERVER)
        other.receive_data(sent_to_instance(request))
        asked, *body = events(other)
        assert asked.target == b"/a"
        assert b"".join(one.data for one in body[:-1]) == request.body
        assert isinstance(body[-1], h11.EndOfMessage)
        assert other.trailing_data == (b"", False)


def events(other: h11.Connection) -> Iterator[h11.Event]:
    while isinstance(event := other.next_event(), h11.Event):
        yield event


async def answered(pieces: list[bytes]) -> list[Any] | None:
    """Status, headers and body; None if they come to no whole answer."""
    pool = connections.Pool(1, 1, 1)
    connection = connections._Connection(pool, connections.place_of(URL))
    connection.connection_made(Socket())
    response = connection.send(b"", b"")
    for piece in pieces:
        if not connection._transport.is_closing():
            connection.data_received(piece)
    connection.connection_lost(None)
    try:
        await response.begun()
        body = await response.read()
    except BrokenOff:
        return None
    return [response.status, list(response.headers.items()), body]


async def check_answers(chance: random.Random) -> None:
    """One is the same in any pieces, whatever comes before or after it."""
    several = (message(chance, SAID) for _ in range(chance.randrange(1, 3)))
    data = changed(chance, b"".join(several), SPLICES)
    assert await answered(cut(chance, data)) == await answered([data])


LONG = [json.dumps(list(range(10_000, 10_000 + n))).encode() for n in (1168, 1171)]
VALUES = [
    *LONG,
    *(ids.replace(b" ", b"") for ids in LONG),
    b'{"prompt": ' + LONG[0] + b"}",
    b"[" + LONG[0] + b", " + LONG[1] + b"]",
    LONG[0][:-1] + b', "a]b", ' + LONG[1][1:],
    LONG[0][:-1] + b', {"prompt": 1}]',
    b'"text"',
    b'"\\"prompt\\": [1"',
    '"é]"'.encode(),
    b"[1, 2]",
    b'{"prompt": [1], "kv_transfer_params": {}}',
    b'{"kv_transfer_params": 1, "a": 2}',
    b'{"kv\\u005ftransfer_params": "x", "top": 1}',
    b"null",
]
KEYS = [b'"prompt"', b'"prompt"', b'"vllm_xargs"', b'"kv_transfer_params"', b'"user"']
KEYS += [b'"kv_transfer\\u005fparams"', b'"model"']
JSON_SPLICES = [*KEYS, b"]", b"[", b"{", b"}", b",", b'"', b"\\", b"-", b".", b"\xff"]
DECODE = msgspec.json.Decoder(Fields).decode
NUMBERS = re.compile(rb"\[[-,./0-9 ]{8000,}\]")


async def check_bodies(chance: random.Random) -> None:
    """They are what a JSON parser sees, and no client decides where KV comes from."""
    fields = [
        chance.choice(KEYS) + chance.choice((b":", b" : ")) + chance.choice(VALUES)
        for _ in range(chance.randrange(1, 5))
    ]
    raw = changed(chance, b"{" + b", ".join(fields) + b"}", JSON_SPLICES)
    expected, found = parsed(DECODE, raw), parsed(top_level, raw)
    if expected is None and found is not None:
        # Of a long array, only its end is looked for.
        ids = bytes(found["prompt"])
        assert NUMBERS.fullmatch(ids)
        expected = parsed(DECODE, raw.replace(ids, b"[1]")) | {"prompt": ids}
    assert found == expected
    try:
        body = Body(raw)
    except BodyError:
        with pytest.raises(ValueError):
            json.loads(raw)
        return
    try:
        sent, wanted = json.loads(body.raw), json.loads(raw)
    except ValueError:
        return  # and vLLM refuses it, too
    for fields in (wanted, wanted.get("vllm_xargs")):
        if isinstance(fields, dict):
            fields.pop("kv_transfer_params", None)
    assert sent == wanted


def parsed(parser: Any, raw: bytes) -> dict[str, bytes] | None:
    try:
        return {name: bytes(value) for name, value in parser(raw).items()}
    except UNREADABLE:
        return None


EVENTS = {
    COMPLETIONS: [
        b'data: {"choices": [{"text": "a"}]}\n\n',
        b'data: {"error": {"message": "died"}}\n\n',
        b"data: [DONE]\n\n",
    ],
    MESSAGES: [
        b'event: content_block_delta\ndata: {"a": 1}\n\n',
        b'event: error\ndata: {"type": "error"}\n\n',
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    ],
    RESPONSES: [
        b"event: response.output_text.delta\ndata: {}\n\n",
        b"event: response.failed\ndata: {}\n\n",
        b"event: response.completed\ndata: {}\n\n",
        b"event: response.incomplete\ndata: {}\n\n",
    ],
}
EVENTS[CHAT] = EVENTS[COMPLETIONS]
STREAM_SPLICES = [b"\n", b"\n\n", b"data: ", b"event: ", b"}", b"[DONE]", b"error"]


class Stream:
    """An instance's answer in pieces, which breaks off after the last one, or ends."""

    status, streams = 200, True

    def __init__(self, pieces: list[bytes], breaks: bool) -> None:
        self.first, *self._rest = pieces
        self._breaks = breaks
        self.headers: CIMultiDict[str] = CIMultiDict()

    @property
    def at_end(self) -> bool:
        return not self._rest and not self._breaks

    async def chunk(self) -> bytes:
        if not self._rest and self._breaks:
            raise Lost(502, "a", "broke off")
        return self._rest.pop(0) if self._rest else b""


class Listener:
    """A client that keeps what it gets, and for what a stream was broken off."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.got = b""
        self.failure: Failure | None = None

    async def begin(self, *_: object) -> None:
        assert not self.got

    async def write(self, chunk: bytes) -> None:
        assert chunk
        self.got += chunk

    async def end(self, chunk: bytes = b"") -> None:
        self.got += chunk

    async def break_off(self, failure: Failure) -> None:
        self.failure = failure
        self.got += error_event(failure, self.path)


async def check_streams(chance: random.Random) -> None:
    """A client gets every byte, and an error if the end is missing; both are noted."""
    path, breaks = chance.choice(list(EVENTS)), chance.random() < 0.2
    events = chance.choices(EVENTS[path], k=chance.randrange(1, 6))
    whole = changed(chance, b"".join(events), STREAM_SPLICES) or b"x"
    api, lines = APIS[path], b"\n" + whole
    complete = any(one in lines for one in api.ends) and lines.endswith(b"\n\n")
    error = any(one in lines for one in api.errors)
    listener, end = Listener(path), DecisionEnd("r", 0, None, instance="a")
    end.prefill_instance = None
    loads = FleetLoad(["a"])
    with loads.flight("a", 1) as flight:
        exchange = SimpleNamespace(end=end, flight=flight, client=listener)
        stream = Stream(cut(chance, whole), breaks)
        await relay(exchange, stream, lambda: False, 1)
    ends_well = complete and not breaks
    assert (listener.failure is None) == ends_well
    failed = b"" if ends_well else error_event(listener.failure, path)
    assert listener.got == whole + failed
    assert end.status == ("ok" if ends_well and not error else "failed")
    if ends_well and error:
        assert end.error == "a sent an error event"
    assert end.generated_tokens == whole.count(api.token)
    assert loads["a"].ongoing_tokens == 0


CHECKS = [check_requests, check_answers, check_bodies, check_streams]


def fuzz(check: Check, cases: int) -> None:
    async def scenario() -> None:
        for case in range(cases):
            try:
                await check(random.Random(case))
            except BaseException as error:
                error.add_note(f"{check.__name__}, case {case}")
                raise

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_a_thousand_messages_are_read_as_others_do(check):
    fuzz(check, 1000)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("check", CHECKS)
def test_many_messages_are_read_as_others_do(check):
    fuzz(check, int(os.environ.get("FUZZ_CASES", "100000")))
