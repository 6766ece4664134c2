# SPDX-License-Identifier: Apache-2.0
"""Only an instance that may be down is ejected, and back when it answers /health."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from proxy_lab import ask

from fleet.instances import Instance
from fleet.proxy import health
from fleet.proxy.app import serving
from fleet.proxy.settings import Settings

# A tenth, and a fiftieth, of the proxy's own, so that doubling can be watched.
MIN_OUT_S, POLL_EVERY_S = 0.1, 0.02
DEADLINE_S = 20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MIN_OUT_S", MIN_OUT_S)
    monkeypatch.setattr(health, "POLL_EVERY_S", POLL_EVERY_S)


class Engine:
    """Answers polls with `polls` in turn, and requests with the status `serves`.

    Status 0 breaks the connection off.
    """

    def __init__(self, polls: tuple[int, ...] = (200,), serves: int = 200) -> None:
        self.polls, self.serves = polls, serves
        self.polled = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        self.polled += 1
        return web.Response(status=self.polls[self.polled % len(self.polls)])

    async def _complete(self, request: web.Request) -> web.Response:
        if not self.serves:
            request.transport.abort()
        return web.json_response({}, status=self.serves or 500)


@asynccontextmanager
async def listening(engine: Engine) -> AsyncIterator[str]:
    runner = web.AppRunner(engine.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Client:
    """Sends to a proxy."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ejected(self) -> list[str]:
        async with self._session.get(f"{self._url}/health") as answer:
            return (await answer.json())["ejected"]

    async def counted(self, name: str) -> float:
        async with self._session.get(f"{self._url}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return next(f.samples[0].value for f in families if f.name == name)

    async def ejections(self) -> float:
        return await self.counted("kvtax_proxy_ejections")

    async def send(self) -> tuple[int, str | None]:
        """The answer's status, and the instance that it is from."""
        body = ask(max_tokens=1, stream=False)
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, json=body) as answer:
            return answer.status, answer.headers.get("X-Kvtax-Instance")

    async def seconds_out(self) -> float:
        """Fail until an instance is ejected; how long it then is out."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.ejected():
                await asyncio.gather(*(self.send() for _ in range(3)))
            since = monotonic()
            while await self.ejected():
                await asyncio.sleep(0.005)
        return monotonic() - since


@asynccontextmanager
async def before(*engines: Engine | Instance) -> AsyncIterator[Client]:
    """A client of a proxy before these, which are called a, b, ..."""
    async with AsyncExitStack() as stack:
        places = [
            one
            if isinstance(one, Instance)
            else Instance(name, await stack.enter_async_context(listening(one)))
            for name, one in zip("abc", engines, strict=False)
        ]
        at = serving(places, Settings("round_robin"), None, "127.0.0.1", 0)
        port = await stack.enter_async_context(at)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(session, f"http://127.0.0.1:{port}")


@pytest.mark.slow
def test_an_instance_that_answers_health_only_is_out_for_longer_each_time() -> None:
    async def scenario() -> None:
        engine = Engine(serves=0)
        async with before(engine) as client:
            out_s = [await client.seconds_out() for _ in range(3)]
            for times, took_s in zip((1, 2, 4), out_s, strict=True):
                assert took_s > 0.9 * times * MIN_OUT_S
            engine.serves = 200
            assert await client.send() == (200, "a")
            # It has answered a request: the shortest time again, not the eightfold.
            engine.serves = 0
            assert await client.seconds_out() < 7 * MIN_OUT_S

    asyncio.run(scenario())


@pytest.mark.slow
def test_bad_polls_count_in_a_row_only() -> None:
    async def scenario() -> None:
        flickers, dead = Engine(polls=(200, 503, 503)), Engine(polls=(503,))
        async with before(flickers, dead) as client, asyncio.timeout(DEADLINE_S):
            while flickers.polled < 30 or not await client.ejected():
                await asyncio.sleep(POLL_EVERY_S)
            assert await client.ejected() == ["b"]
            assert await client.ejections() == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_answer_ejects_nobody_whatever_its_status(status: int) -> None:
    async def scenario() -> None:
        async with before(Engine(serves=status)) as client:
            for _ in range(10):
                assert (await client.send())[0] == status
            assert await client.ejections() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EMFILE])
def test_without_ports_or_files_no_instance_is_to_blame(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async def scenario() -> None:
        async with before(Engine(), Engine()) as client:
            assert await client.ejected() == []  # this connection is kept
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "create_connection", fail)
            assert (await client.send())[0] == 503
            await asyncio.sleep(10 * POLL_EVERY_S)
            assert await client.ejections() == 0

    asyncio.run(scenario())


def test_a_name_that_nobody_can_look_up_is_tried_elsewhere_and_blamed_on_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = socket.getaddrinfo

    def fail(host: str, *rest: object, **named: object) -> list:
        if host == "a.invalid":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        return look_up(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", fail)

    async def scenario() -> None:
        async with before(Instance("a", "http://a.invalid:1"), Engine()) as client:
            for _ in range(4):
                assert await client.send() == (200, "b")
            await asyncio.sleep(10 * POLL_EVERY_S)
            assert await client.ejections() == 0

    asyncio.run(scenario())


def test_if_nobody_is_left_requests_go_to_all_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        engines = Engine(polls=(503,)), Engine(polls=(503,))
        async with before(*engines) as client, asyncio.timeout(DEADLINE_S):
            while len(await client.ejected()) < 2:
                await asyncio.sleep(POLL_EVERY_S)
            assert {await client.send() for _ in range(2)} == {(200, "a"), (200, "b")}
            assert await client.counted("kvtax_proxy_failed_open") == 2
            # One that is back gets all of them.
            engines[1].polls = (200,)
            while len(await client.ejected()) == 2:
                await asyncio.sleep(POLL_EVERY_S)
            assert {await client.send() for _ in range(3)} == {(200, "b")}
            assert await client.counted("kvtax_proxy_failed_open") == 2

    asyncio.run(scenario())
    said = [one.getMessage() for one in caplog.records if "all are" in one.getMessage()]
    assert said == ["all are ejected: requests go to them as if none were"]


def test_if_no_instance_of_the_role_is_left_its_ejected_ones_are_tried() -> None:
    async def scenario() -> None:
        prefills, decodes = Engine(), Engine(polls=(503,))
        async with (
            listening(prefills) as p,
            before(Instance("p", p, role="prefill"), decodes) as client,
            asyncio.timeout(DEADLINE_S),
        ):
            while await client.ejected() != ["b"]:
                await asyncio.sleep(POLL_EVERY_S)
            assert await client.send() == (200, "b")

    asyncio.run(scenario())
