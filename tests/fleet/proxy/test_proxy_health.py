# SPDX-License-Identifier: Apache-2.0
"""An ejected instance is back when it answers /health, but never before its time."""

from __future__ import annotations

import asyncio
from time import monotonic

import aiohttp
import pytest
from aiohttp import web
from proxy_lab import ask

from fleet.instances import Instance
from fleet.proxy import health
from fleet.proxy.app import serving
from fleet.proxy.settings import Settings

# A tenth, and a fiftieth, of the proxy's own, so that doubling can be watched.
MIN_OUT_S, POLL_EVERY_S = 0.1, 0.02


class HealthOnly:
    """An instance whose /health answers, whatever becomes of its completions."""

    def __init__(self) -> None:
        self.serves = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=200 if self.serves else 500)


async def listening(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


class Client:
    """Sends to a proxy before one instance."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def _healthy(self) -> bool:
        async with self._session.get(f"{self._url}/health") as answer:
            return answer.status == 200

    async def send(self) -> int:
        body = ask(max_tokens=1, stream=False)
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, json=body) as answer:
            return answer.status

    async def seconds_out(self) -> float:
        """Fail until the instance is ejected; how long it then is out."""
        async with asyncio.timeout(20):
            while await self._healthy():
                await self.send()
            since = monotonic()
            while not await self._healthy():
                await asyncio.sleep(0.005)
        return monotonic() - since


def test_an_instance_that_answers_health_only_is_out_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MIN_OUT_S", MIN_OUT_S)
    monkeypatch.setattr(health, "POLL_EVERY_S", POLL_EVERY_S)

    async def scenario() -> None:
        instance = HealthOnly()
        runner, url = await listening(instance.app())
        settings = Settings("round_robin")
        async with (
            serving([Instance("a", url)], settings, None, "127.0.0.1", 0) as port,
            aiohttp.ClientSession() as session,
        ):
            client = Client(session, f"http://127.0.0.1:{port}")
            out_s = [await client.seconds_out() for _ in range(3)]
            for times, took_s in zip((1, 2, 4), out_s, strict=True):
                assert took_s > 0.9 * times * MIN_OUT_S
            instance.serves = True
            assert await client.send() == 200
            # It has answered a request: the shortest time again, not the eightfold.
            instance.serves = False
            assert await client.seconds_out() < 7 * MIN_OUT_S
        await runner.cleanup()

    asyncio.run(scenario())
