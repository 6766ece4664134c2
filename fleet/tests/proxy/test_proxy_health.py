# SPDX-License-Identifier: Apache-2.0
"""One rule of failure: out until /health answers, and busy is not dead."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from fleet.tests.proxy.proxy_lab import SLOW, ask, free_port, named, post, proxy, until
from tests.harness.standin.process import standin

from kvtax_fleet.proxy import upstream
from kvtax_fleet.proxy.exchange import Failure, Lost, Silent, Unreachable
from kvtax_fleet.proxy.health import Health
from kvtax_fleet.proxy.service import Endpoint, Proxy, serving
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance

A, B = Instance("a", "http://h:1"), Instance("b", "http://h:2")


def health_of(busy: set[str]) -> tuple[Health, list[str]]:
    """A rule over two instances, and the names that it has put out."""
    put_out: list[str] = []
    return Health([A, B], busy.__contains__, put_out.append), put_out


@pytest.mark.parametrize(
    ("failure", "is_out"),
    [
        (Unreachable(503, "a", "refused"), True),
        (Lost(502, "a", "reset"), True),
        (Silent(504, "a", "nothing for 300 s"), True),
        (Failure(500, "a", "an error event"), False),
        (Unreachable(503, None, "the proxy has no more files"), False),
    ],
)
def test_an_instance_is_out_once_its_connection_is_lost(failure, is_out):
    health, put_out = health_of(set())
    health.failed(failure)
    health.failed(failure)
    assert health.out == ({"a"} if is_out else set())
    assert put_out == (["a"] if is_out else [])


@pytest.mark.parametrize("busy", [set(), {"a"}])
@pytest.mark.parametrize("kind", [Silent, Lost, Unreachable])
async def test_work_in_flight_excuses_a_late_answer_and_no_error(busy, kind):
    health, _ = health_of(busy)

    async def fail(instance: Instance) -> None:
        raise kind(503, instance.name, "bad poll")

    await health.poll(fail, A)
    assert health.out == (set() if busy and kind is Silent else {"a"})


async def test_a_good_answer_of_health_brings_it_back_and_wakes_who_waits():
    health, _ = health_of(set())
    health.failed(Lost(502, "a", "reset"))
    waiting = asyncio.create_task(health.until_return())
    await asyncio.sleep(0)

    async def good(instance: Instance) -> None:
        pass

    await health.poll(good, B)
    await asyncio.sleep(0)
    assert health.out == {"a"} and not waiting.done()
    await health.poll(good, A)
    await waiting
    assert health.out == set()


Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def instance_of(health: Answering, answer: Answering) -> AsyncIterator[str]:
    """Serve an instance by these handlers."""
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask_all(proxy: Proxy, number: int) -> list[int]:
    url = f"http://127.0.0.1:{proxy.ports.clients}/v1/completions"
    async with ClientSession() as session:

        async def status(place: int) -> int:
            async with session.post(url, json={"prompt": [place]}) as response:
                await response.read()
                return response.status

        return await asyncio.gather(*map(status, range(number)))


@pytest.mark.slow
async def test_instances_too_busy_for_health_answer_all_requests(monkeypatch):
    """Polls end long before the first token, as during a long prefill."""
    monkeypatch.setattr(upstream, "PAGE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("kvtax_fleet.proxy.health.POLL_EVERY_S", 0.05)
    begun = asyncio.Event()

    async def health(_: web.Request) -> web.Response:
        if begun.is_set():
            await asyncio.sleep(3)
        return web.Response()

    async def answer(_: web.Request) -> web.Response:
        begun.set()
        await asyncio.sleep(1.5)
        return web.json_response({"choices": [{"text": "a"}]})

    async with instance_of(health, answer) as a, instance_of(health, answer) as b:
        places = [Instance("a", a), Instance("b", b)]
        at = Endpoint("127.0.0.1", 0)
        async with serving(places, Settings("load_only"), None, at) as proxy:
            # Once nothing is in flight, an instance that is silent goes out.
            assert await ask_all(proxy, 8) == [200] * 8


@pytest.mark.slow
def test_where_all_are_out_requests_wait_for_the_first_that_is_back(tmp_path):
    port = free_port()
    nobody = [Instance("a", f"http://127.0.0.1:{port}")]
    with proxy(tmp_path, nobody, "linear") as on, ThreadPoolExecutor() as clients:
        asked = [clients.submit(post, on.url, ask([n])) for n in range(4)]
        until(lambda: on.out() == ["a"], "it is not out")
        assert not any(answer.done() for answer in asked)
        with standin("--port", str(port)):
            assert [answer.result().status for answer in asked] == [200] * 4
        on.idle()
        on.accounted(4)


@pytest.mark.slow
def test_who_waits_for_an_instance_is_refused_in_time(tmp_path):
    nobody = [Instance("a", f"http://127.0.0.1:{free_port()}")]
    with proxy(tmp_path, nobody, "linear", "--silence-timeout-s", "1") as on:
        answer = post(on.url, ask())
        assert answer.status == 503
        assert "no instance has come back" in answer.error["message"]
        on.idle()


@pytest.mark.slow
def test_a_killed_instances_request_is_answered_by_another(two, tmp_path):
    with (
        standin(*SLOW, "--faults", "hang") as mute,
        proxy(tmp_path, named([mute, two[1]])) as on,
        ThreadPoolExecutor() as clients,
    ):
        asked = clients.submit(post, on.url, ask(), X_Request_Id="moved")
        until(lambda: on.instances()["a"]["requests"] == 1, "not sent on")
        mute.process.kill()
        answer = asked.result()
        assert (answer.status, answer.headers["X-Kvtax-Instance"]) == (200, "b")
        on.end("moved")
        assert [each["attempt"] for each in on.lines("decision")] == [0, 1]
        until(lambda: on.out() == ["a"], "it is not out")
        on.idle()


@pytest.mark.slow
def test_a_stopped_instance_is_out_when_idle_and_back_when_it_goes_on(two, tmp_path):
    with proxy(tmp_path, named(two)) as on:
        os.kill(two[0].process.pid, signal.SIGSTOP)
        try:
            until(lambda: on.out() == ["a"], "it is not out")
            for _ in range(3):
                assert post(on.url, ask()).headers["X-Kvtax-Instance"] == "b"
        finally:
            os.kill(two[0].process.pid, signal.SIGCONT)
        until(lambda: on.out() == [], "it is not back")
        assert {post(on.url, ask()).headers["X-Kvtax-Instance"] for _ in "ab"} == {
            "a",
            "b",
        }
