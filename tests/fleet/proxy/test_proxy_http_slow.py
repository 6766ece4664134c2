# SPDX-License-Identifier: Apache-2.0
"""Clients that take their time: the hostile end early, the slow are waited for."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from http_lab import DEADLINE_S, LIMIT_BYTES, Wire, ask, echo, serving
from multidict import CIMultiDict

from fleet.proxy.http import server
from fleet.proxy.http.request import Request
from fleet.proxy.http.server import Server


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
def test_who_sends_a_request_too_slowly_is_told_and_cut(soon, begun: bytes) -> None:
    async def drip(wire: Wire) -> None:
        while True:
            wire.send(b"a")
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            wire.send(begun)
            if begun.endswith(b"\n"):
                dripping = asyncio.create_task(drip(wire))
            assert (await wire.head())[0] == 408
            await wire.rest()
            if begun.endswith(b"\n"):
                dripping.cancel()

    uvloop.run(scenario())


def test_who_sends_slowly_but_steadily_is_waited_for(soon) -> None:
    async def scenario() -> None:
        async with serving() as dial:
            wire = await dial()
            asked = ask(b"x" * 900)
            wire.send(asked[:-900])
            for _ in range(9):
                wire.send(b"x" * 100)  # at 2,000 bytes per second
                await asyncio.sleep(0.05)
            assert (await wire.answer())[1]["body"] == "x" * 900

    uvloop.run(scenario())


@pytest.mark.slow
def test_idle_connections_end_and_those_that_are_answered_do_not(soon) -> None:
    async def scenario() -> None:
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

    uvloop.run(scenario())


def test_handling_ends_with_the_client_and_a_failure_with_the_connection() -> None:
    async def scenario() -> None:
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

    uvloop.run(scenario())


async def megabytes(request: Request) -> None:
    request.whole(200, CIMultiDict(), b"1" * 24_000_000)


@pytest.mark.slow
def test_an_answer_is_sent_to_its_end_however_slowly_it_is_taken(soon) -> None:
    async def scenario() -> None:
        async with serving(megabytes, client_timeout_s=0.4) as dial:
            for lines in ((), ("Connection: close",)):
                wire = await dial()
                wire.send(ask(b"", *lines))
                await wire.head()
                for _ in range(24):
                    await asyncio.sleep(0.04)
                    await wire.reader.readexactly(1_000_000)

    uvloop.run(scenario())


@pytest.mark.slow
def test_who_takes_nothing_of_an_answer_is_cut(soon) -> None:
    async def scenario() -> None:
        async with serving(megabytes, client_timeout_s=0.2) as dial:
            wire = await dial()
            wire.send(ask())
            await asyncio.sleep(0.6)
            await wire.is_gone()

    uvloop.run(scenario())


def test_a_server_that_ends_answers_what_it_has_been_asked(soon) -> None:
    async def scenario() -> None:
        async def slow(request: Request) -> None:
            await asyncio.sleep(0.05)
            await echo(request)

        serves = Server(slow, LIMIT_BYTES, DEADLINE_S)
        listening = await serves.listen("127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        wire, idle = [
            Wire(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)
        ]
        wire.send(ask(b"last"))
        await asyncio.sleep(0.02)
        listening.close()
        ending = asyncio.create_task(serves.close())
        assert (await wire.answer())[1]["body"] == "last"
        assert await wire.rest() == await idle.rest() == b""
        for one in (wire, idle):
            one.writer.close()
        await ending
        assert serves.connections == set()

    uvloop.run(scenario())
