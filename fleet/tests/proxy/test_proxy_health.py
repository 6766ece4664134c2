# SPDX-License-Identifier: Apache-2.0
"""An instance's health: what its first event and its failures say of it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from fleet.tests.proxy.proxy_lab import DEADLINE_S, ask, free_port
from multidict import CIMultiDict
from prometheus_client.parser import text_string_to_metric_families

from kvtax_fleet.proxy import core, health
from kvtax_fleet.proxy.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.exchange import Failure, Lost, Unreachable
from kvtax_fleet.proxy.service import Endpoint, Ports, serving
from kvtax_fleet.proxy.settings import Settings, resolved
from kvtax_fleet.proxy.upstream import MAX_FIRST_EVENT_BYTES
from kvtax_fleet.records.decisions import DecisionsHeader
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.simulate.virtual_loop import VirtualLoop

# A tenth, and a fiftieth, of the proxy's own, so that doubling can be watched.
MIN_OUT_S, POLL_EVERY_S = 0.1, 0.02
RANK = "X-data-parallel-rank"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MIN_OUT_S", MIN_OUT_S)
    monkeypatch.setattr(health, "POLL_EVERY_S", POLL_EVERY_S)


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
ERROR = b'data: {"error": {"message": "engine died"}}\n\n'
DONE = b"data: [DONE]\n\n"


class Engine:
    """Answers polls with `polls` in turn, and requests with the status `serves`.

    With `pieces` an answer is a stream that comes in these pieces, and then `ends` or
    stays open. Each answer `takes_s`; those to poison fail by `poison`, those for the
    model `broken` by 503. It lists its `models`, None for a server that does not.
    """

    def __init__(self, polls: tuple[int, ...] = (200,), serves: int = 200) -> None:
        self.polls, self.serves = polls, serves
        self.polled = 0
        self.pieces: list[bytes] = []
        self.ends = True
        self.takes_s = 0.0
        self.poison = "event"
        self.text = '{"choices": [{"text": "a"}]}'
        self.models: list[str] | None = None
        self.broken = "none"
        self.ranks: list[list[str]] = []

    async def health(self, _: web.Request) -> web.Response:
        self.polled += 1
        return web.Response(status=self.polls[self.polled % len(self.polls)])

    async def list_models(self, _: web.Request) -> web.Response:
        if self.models is None:
            raise web.HTTPUnauthorized
        listed = [{"id": name, "object": "model"} for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.ranks.append(request.headers.getall(RANK, []))
        pieces = self.pieces
        if f'"{self.broken}"' in await request.text():
            return web.Response(status=503)
        if "X-Poison" in request.headers:
            if self.poison == "status":
                return web.Response(status=500)
            pieces = [TOKEN, ERROR]
        else:
            await asyncio.sleep(self.takes_s)
        if not pieces:
            return web.Response(text=self.text, status=self.serves)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, piece in enumerate(pieces):
            await asyncio.sleep(0.005 if number else 0)
            await response.write(piece)
        if not self.ends:
            await asyncio.sleep(60)
        return response


@asynccontextmanager
async def listening(engine: Engine, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/health", engine.health)
    app.router.add_get("/v1/models", engine.list_models)
    app.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Client:
    """Sends to a proxy, and reads its control surface."""

    def __init__(self, session: aiohttp.ClientSession, ports: Ports) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{ports.clients}"
        self._control = f"http://127.0.0.1:{ports.control}"

    async def ejected(self) -> list[str]:
        async with self._session.get(f"{self._control}/health") as answer:
            return (await answer.json())["ejected"]

    async def counted(self, name: str) -> float:
        async with self._session.get(f"{self._control}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return next(f.samples[0].value for f in families if f.name == name)

    async def ended(self) -> dict[str, int]:
        """Requests by status, at the first instance."""
        async with self._session.get(f"{self._control}/breakdown") as answer:
            return (await answer.json())["instances"]["a"]["ended"]

    async def get(self, path: str) -> int:
        async with self._session.get(self._url + path) as answer:
            return answer.status

    async def ejections(self) -> float:
        return await self.counted("kvtax_proxy_ejections")

    async def send(
        self,
        path: str = COMPLETIONS,
        whole: bool = False,
        model: str | None = "null",
        **headers: str,
    ) -> tuple[int, str | None]:
        """The status of the answer (read if `whole`), and its instance."""
        body = ask(max_tokens=1, stream=False, model=model)
        url = self._url + path
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        async with self._session.post(url, json=body, headers=headers) as answer:
            if whole:
                await answer.read()
            return answer.status, answer.headers.get("X-Kvtax-Instance")


@asynccontextmanager
async def before(
    *engines: Engine | Instance, policy: str = "round_robin", **settings: float
) -> AsyncIterator[Client]:
    """A client of a proxy before these, which are called a, b, ..."""
    async with AsyncExitStack() as stack:
        places = [
            one
            if isinstance(one, Instance)
            else Instance(name, await stack.enter_async_context(listening(one)))
            for name, one in zip("abcd", engines, strict=False)
        ]
        at = serving(
            places, Settings(policy, **settings), None, Endpoint("127.0.0.1", 0)
        )
        on = await stack.enter_async_context(at)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Client(session, on.ports)


def test_an_instance_that_answers_health_only_is_out_for_longer_each_time():
    """And for the shortest time again once it is trusted."""

    async def polled_well(_: Instance) -> None:
        pass

    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        a = Instance("a", "http://a:1")
        healths = health.Health([a], lambda *_: None, loop.now_ns)
        polling = asyncio.create_task(healths.poll_forever(polled_well))

        async def seconds_out() -> float:
            while not healths.ejected:
                healths.failed(Unreachable(503, "a", "refused"), None, "s")
            since = loop.time()
            while healths.ejected:
                await asyncio.sleep(POLL_EVERY_S)
            return loop.time() - since

        out_s = [await seconds_out() for _ in range(3)]
        for _ in range(health.TRUSTED_AFTER):
            healths.answered("a", None, "s", well=True)
        out_s.append(await seconds_out())
        polling.cancel()
        return out_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        out_s = runner.run(scenario())
    expected = [times * MIN_OUT_S for times in (1, 2, 4, 1)]
    assert out_s == pytest.approx(expected, abs=2 * POLL_EVERY_S)


async def test_nothing_that_a_poll_raises_ends_polls():
    polled: list[str] = []
    ab = [Instance(name, f"http://{name}:1") for name in "ab"]
    healths = health.Health(ab, lambda *_: None, monotonic_ns)

    async def probe(instance: Instance) -> None:
        polled.append(instance.name)
        raise RuntimeError("unforeseen")

    polling = asyncio.create_task(healths.poll_forever(probe))
    async with asyncio.timeout(DEADLINE_S):
        while min(map(polled.count, "ab")) < 3:
            await asyncio.sleep(POLL_EVERY_S)
    assert not polling.done()
    polling.cancel()


@pytest.mark.slow
async def test_bad_polls_count_in_a_row_only():
    flickers, dead = Engine(polls=(200, 503, 503)), Engine(polls=(503,))
    async with before(flickers, dead) as client, asyncio.timeout(DEADLINE_S):
        while flickers.polled < 30 or not await client.ejected():
            await asyncio.sleep(POLL_EVERY_S)
        assert await client.ejected() == ["b"]
        assert await client.ejections() == 1


@pytest.mark.parametrize("status", [400, 404, 500, 503])
@pytest.mark.parametrize("count", [1, 3])
async def test_what_all_instances_answer_alike_ejects_nobody(status, count):
    engines = [Engine(serves=status) for _ in range(count)]
    async with before(*engines) as client:
        for _ in range(60):
            assert (await client.send(X_Session_Id="s"))[0] == status
        assert await client.ejections() == 0
    # A refusal is sent twice now and then only.
    most = 60 * 1.25 if status < 500 else 120
    assert sum(len(engine.ranks) for engine in engines) <= most


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 404, 500])
async def test_an_outlier_is_out_for_longer_each_time_and_tried_with_one_request(
    status,
):
    good, bad = Engine(), Engine(serves=status)
    async with before(good, bad, policy="linear") as client:
        sent = [await client.send() for _ in range(100)]
        assert sum(got != 200 for got, _ in sent) < health.SUSPECT_FAILURES
        async with asyncio.timeout(DEADLINE_S):
            while await client.ejections() < 4:
                answers = await asyncio.gather(*(client.send() for _ in range(8)))
                assert set(answers) == {(200, "a")}
        # Each trial is one request, and another instance answers it for the client.
        trials = await client.ejections() - 1
        assert len(bad.ranks) == health.SUSPECT_FAILURES + trials
        bad.serves = 200
        async with asyncio.timeout(DEADLINE_S):
            while (200, "b") not in await asyncio.gather(
                *(client.send() for _ in range(8))
            ):
                pass
        assert await client.ejected() == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (302, "moved"),
        (200, "<html>log in"),
        (200, ""),
        (200, ' {"error": {}}'),
        (204, ""),
    ],
)
async def test_an_instance_without_results_is_an_outlier(status, text, monkeypatch):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    good, bad = Engine(), Engine(serves=status)
    bad.text = text
    async with before(good, bad, policy="linear") as client:
        instances = [(await client.send())[1] for _ in range(50)]
        assert instances.count("b") < health.SUSPECT_FAILURES
        assert await client.ejected() == ["b"]


@pytest.mark.slow
async def test_a_trial_lasts_until_another_instance_has_answered_for_it():
    good, bad = Engine(), Engine(serves=500)
    async with before(good, bad, policy="linear") as client:
        while await client.ejections() < 1:
            await client.send()
        before_trial, good.takes_s = len(bad.ranks), 1.0
        await asyncio.sleep(2 * MIN_OUT_S)
        sent = []
        for _ in range(8):
            sent.append(asyncio.create_task(client.send()))
            await asyncio.sleep(0.02)
        assert set(await asyncio.gather(*sent)) == {(200, "a")}
        assert len(bad.ranks) == before_trial + 1


async def test_a_session_leaves_an_outlier(monkeypatch):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    engines = {"a": Engine(), "b": Engine()}
    async with before(*engines.values(), policy="linear") as client:
        _, pinned = await client.send(X_Session_Id="s")
        engines[pinned].serves = 500
        statuses = [(await client.send(X_Session_Id="s"))[0] for _ in range(20)]
        assert statuses.count(500) < health.SUSPECT_FAILURES
        assert set(statuses[health.SUSPECT_FAILURES :]) == {200}


async def test_no_more_outliers_are_out_at_once_than_the_budget_allows(monkeypatch):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    engines = [Engine(serves=500), Engine(serves=500), Engine()]
    async with before(*engines, policy="linear") as client:
        statuses = [(await client.send())[0] for _ in range(60)]
        assert await client.ejections() == 1
        # What the other one fails is still answered by the third.
        assert set(statuses[30:]) == {200}


@pytest.mark.parametrize("error", [ERROR, b'data: { "error" : {} }\n\n', b""])
async def test_streams_that_fail_after_their_first_token_eject_an_outlier(
    monkeypatch, error
):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    good, bad = Engine(), Engine()
    good.pieces, bad.pieces = [TOKEN, DONE], [TOKEN, error]
    async with before(good, bad) as client:
        for _ in range(4 * health.SUSPECT_FAILURES):
            await client.send(whole=True, Connection="close")
        assert await client.ejected() == ["b"]


@pytest.mark.slow
async def test_an_instance_whose_fast_streams_fail_gets_few_requests(monkeypatch):
    """Those until it is suspect and those under way then; one at each return."""
    monkeypatch.setattr(health, "MIN_OUT_S", 0.2)
    good, bad = Engine(), Engine()
    good.pieces, bad.pieces = [TOKEN, DONE], [TOKEN, ERROR]
    good.takes_s = 0.1

    async def user(client: Client) -> None:
        for _ in range(15):
            await client.send(whole=True, Connection="close")

    async with before(good, bad, policy="lmetric") as client:
        async with asyncio.TaskGroup() as users:
            for _ in range(8):
                users.create_task(user(client))
        ejections = await client.ejections()
        assert ejections > 1
        assert len(bad.ranks) <= health.SUSPECT_FAILURES + 8 + ejections


@pytest.mark.slow
async def test_an_instance_that_fails_other_paths_is_an_outlier_there_too(monkeypatch):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    engines = [Engine(serves=500), Engine(), Engine()]
    async with before(*engines) as client:
        sent = [await client.send("/v1/embeddings") for _ in range(30)]
        assert {status for status, _ in sent} == {200}
        assert await client.ejected() == ["a"]
        assert len(engines[0].ranks) == health.SUSPECT_FAILURES
        for engine in engines:
            engine.serves = 500
        before_one = sum(len(engine.ranks) for engine in engines)
        assert (await client.send("/v1/embeddings"))[0] == 500
        # One more is tried, lest a fault of all multiplies what they have to do.
        assert sum(len(engine.ranks) for engine in engines) == before_one + 2


@pytest.mark.slow
async def test_a_suspect_gets_nothing_until_another_has_answered_for_it(monkeypatch):
    """A fast failure would be the least loaded until then."""
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    good, bad = Engine(), Engine(serves=500)
    good.takes_s = 0.15

    statuses: list[int] = []

    async def user(client: Client) -> None:
        for _ in range(3):
            statuses.append((await client.send())[0])

    async with before(good, bad, policy="lmetric") as client:
        await asyncio.gather(*(user(client) for _ in range(24)))
        assert await client.ejected() == ["b"]
    # At first each instance gets a half; no more are tried again at a time.
    assert statuses.count(500) <= 12 - core.MIN_RETRIES
    assert len(bad.ranks) <= 13


async def test_an_instance_that_never_answers_is_an_outlier(monkeypatch):
    """Its /health is good, and the requests are no streams."""
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    monkeypatch.setattr(core, "MIN_WAIT_S", 0.05)
    mute, good = Engine(), Engine()
    mute.takes_s = 3600.0
    async with before(mute, good) as client, asyncio.timeout(DEADLINE_S):
        while await client.ejected() != ["a"]:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await client.send()
        assert {await client.send() for _ in range(8)} == {(200, "b")}


@pytest.mark.slow
async def test_clients_that_leave_soon_eject_nobody(monkeypatch):
    monkeypatch.setattr(core, "MIN_WAIT_S", 0.05)
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.takes_s = 0.5
    async with before(*engines) as client:
        for _ in range(4 * health.SUSPECT_FAILURES):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.send()
        assert await client.ejections() == 0


async def test_a_model_that_fails_at_an_instance_is_out_there_alone(monkeypatch):
    monkeypatch.setattr(health, "MIN_OUT_S", 60)
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.models = ["base", "adapter"]
    engines[0].broken = "adapter"
    sent: dict[str, list[tuple[int, str | None]]] = {"base": [], "adapter": []}
    async with before(*engines) as client:
        chance = random.Random(0)
        for number in range(200):
            model, name = chance.choice(["base", "adapter"]), f"{number % 20}"
            sent[model].append(await client.send(model=model, X_Session_Id=name))
        assert await client.ejections() == 1
        assert await client.ejected() == []
    assert {status for one in sent.values() for status, _ in one} == {200}
    assert set(sent["base"][-20:]) == {(200, "a"), (200, "b")}
    assert set(sent["adapter"][-20:]) == {(200, "b")}


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EMFILE])
async def test_without_ports_or_files_no_instance_is_to_blame(number, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async with before(Engine(), Engine()) as client:
        # The connections of both are kept, and none to an instance.
        assert await client.ejected() == []
        await client.get("/health")
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "create_connection", fail)
        assert (await client.send())[0] == 503
        await asyncio.sleep(10 * POLL_EVERY_S)
        assert await client.ejections() == 0


async def test_a_refused_connection_is_tried_elsewhere(monkeypatch):
    monkeypatch.setattr(health, "POLL_EVERY_S", 60)
    async with AsyncExitStack() as stack:
        gone = Instance("a", await stack.enter_async_context(listening(Engine())))
        async with before(gone, Engine()) as client:
            await stack.aclose()
            assert {await client.send() for _ in range(4)} == {(200, "b")}
            assert await client.ejected() == ["a"]


@pytest.mark.slow
async def test_answers_that_are_no_streams_take_as_long_as_they_take(monkeypatch):
    """And eject nobody, whatever a stream's limit is."""
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.takes_s = 1.0
    async with before(*engines, silence_timeout_s=0.2) as client:
        sent = await asyncio.gather(*(client.send() for _ in range(16)))
        assert {status for status, _ in sent} == {200}
        assert await client.ejections() == 0


async def test_attempts_that_wait_for_an_instance_that_is_down_go_elsewhere():
    hangs, good = Engine(), Engine()
    hangs.takes_s = 3600.0
    async with before(hangs, good) as client, asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(client.send())
        await asyncio.sleep(5 * POLL_EVERY_S)
        hangs.polls = (503,)
        assert await waiting == (200, "b")
        assert await client.ejected() == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "sessions", "policy"),
    [
        ("event", 1, "linear"),
        ("event", 8, "lmetric"),
        ("event", 10_000, "linear"),
        ("status", 1, "lmetric"),
        ("status", 8, "linear"),
        ("status", 10_000, "lmetric"),
    ],
)
async def test_one_clients_broken_requests_eject_nobody(poison, sessions, policy):
    engines = [Engine() for _ in range(4)]
    for engine in engines:
        engine.poison = poison
        engine.takes_s = 0.02
    sent = []

    async def users(client: Client, name: str) -> None:
        for number in range(30):
            sent.append(await client.send(X_Session_Id=f"{name}{number}"))

    async with before(*engines, policy=policy) as client:
        async with asyncio.TaskGroup() as clients:
            for name in "pqr":
                clients.create_task(users(client, name))
            for number in range(200):
                evil = {"X_Session_Id": f"evil{number % sessions}", "X_Poison": "1"}
                await client.send(whole=True, Connection="close", **evil)
        assert await client.ejections() == 0
    assert {status for status, _ in sent} == {200}


def resolve_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no `.invalid` resolve at once, whatever this machine's name server takes."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: str, *more: Any, **options: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await resolve(host, *more, **options)

    monkeypatch.setattr(loop, "getaddrinfo", resolved)


async def test_a_name_that_does_not_resolve_is_a_dead_instance(monkeypatch):
    resolve_no_name(monkeypatch)
    gone = Instance("a", "http://gone.invalid:1")
    async with before(gone, Engine()) as client:
        assert await client.ejected() == ["a"]
        assert {await client.send() for _ in range(20)} == {(200, "b")}


async def test_if_no_name_resolves_no_instance_is_to_blame(monkeypatch):
    resolve_no_name(monkeypatch)
    gone = [Instance(name, f"http://{name}.invalid:1") for name in "ab"]
    async with before(*gone) as client:
        assert (await client.send())[0] == 503
        await asyncio.sleep(10 * POLL_EVERY_S)
        assert await client.ejections() == 0


async def test_if_nobody_is_left_requests_go_to_all_of_them(caplog):
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
    said = [one.getMessage() for one in caplog.records if "all are" in one.getMessage()]
    assert said == ["all are ejected: requests go to them as if none were"]


async def test_if_no_instance_of_the_role_is_left_its_ejected_ones_are_tried():
    prefills, decodes = Engine(), Engine(polls=(503,))
    async with (
        listening(prefills) as p,
        before(Instance("p", p, role="prefill"), decodes) as client,
        asyncio.timeout(DEADLINE_S),
    ):
        while await client.ejected() != ["b"]:
            await asyncio.sleep(POLL_EVERY_S)
        assert await client.send() == (200, "b")


ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"total_tokens": 1}}\n\n'

START = b'event: message_start\ndata: {"type":"message_start"}\n\n'
NOTHING = b'event: message_delta\ndata: {"usage":{"output_tokens":0}}\n\n'
SPENT = b'event: message_delta\ndata: {"usage":{"output_tokens":1}}\n\n'
WRONG = b'event: error\ndata: {"type":"error"}\n\n'
CREATED = b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
COMPLETED = (
    b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":0}}}'
)


async def status(
    engine: Engine,
    client: Client,
    *pieces: bytes,
    ends: bool = True,
    path: str = COMPLETIONS,
) -> int:
    """The status of the answer when the stream comes in these pieces."""
    engine.pieces, engine.ends = list(pieces), ends
    return (await client.send(path))[0]


FAILURES = {
    "error": (CHAT, ERROR),
    "usage": (CHAT, USAGE + DONE),
    "end": (CHAT, DONE),
    "role, error": (CHAT, ROLE + ERROR),
    "role, usage": (CHAT, ROLE + USAGE + DONE),
    "role, end": (CHAT, ROLE + DONE),
    "message, error": (MESSAGES, START + WRONG),
    "message, end": (MESSAGES, START + NOTHING),
    "response, error": (RESPONSES, CREATED + WRONG),
    "response, end": (RESPONSES, CREATED + COMPLETED + b"\n\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
async def test_no_cut_makes_a_failure_a_200(case):
    path, whole = FAILURES[case]

    engine = Engine()
    async with before(engine) as client:
        for cut in range(1, len(whole), 3):
            got = await status(engine, client, whole[:cut], whole[cut:], path=path)
            assert got == 502, f"{whole[:cut]} | {whole[cut:]}"
        single = (bytes([one]) for one in whole)
        assert await status(engine, client, *single, path=path) == 502


async def test_a_stream_that_ends_in_its_first_event_is_a_failure():
    engine = Engine()
    async with before(engine) as client:
        assert await status(engine, client, b'data: {"err') == 502
        assert await status(engine, client, ROLE, TOKEN[:-2]) == 502


@pytest.mark.slow
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("colon", [b": ", b":"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_events_may_have_other_ends_of_lines_and_no_blanks(line_end, colon, path):
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    events = {CHAT: ROLE + TOKEN + DONE, MESSAGES: START + delta + stop}[path]
    whole = events.replace(b": ", colon).replace(b"\n", line_end)
    engine = Engine()
    async with before(engine) as client:
        for cut in range(1, len(whole), 7):
            engine.pieces = [whole[:cut], whole[cut:]]
            got, _ = await client.send(path, whole=True, Connection="close")
            assert got == 200
        assert list(await client.ended()) == ["ok"]


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_without_blanks_is_no_200(case):
    path, whole = FAILURES[case]
    engine = Engine()
    async with before(engine) as client:
        bare = whole.replace(b": ", b":")
        assert await status(engine, client, bare, path=path) == 502


async def test_an_answer_waits_for_its_first_event_and_for_no_more():
    engine = Engine()
    async with before(engine) as client, asyncio.timeout(DEADLINE_S):
        first_of = partial(status, engine, client, ends=False)
        assert await first_of(TOKEN) == 200
        assert await first_of(TOKEN[:9], TOKEN[9:]) == 200
        # A model may have nothing to say, and have computed for it.
        assert await first_of(START, SPENT, path=MESSAGES) == 200
        # Nor for the end of an event that has none.
        endless = b"data: " + b"x" * MAX_FIRST_EVENT_BYTES
        assert await first_of(endless) == 200


async def test_a_request_names_the_engine_that_it_is_for():
    engine = Engine()
    async with listening(engine) as url:
        both = [Instance(f"i{n}", url, data_parallel_rank=n) for n in (0, 1)]
        async with before(*both) as client:
            for _ in both:
                assert (await client.send(**{RANK: "7"}))[0] == 200
    assert sorted(engine.ranks) == [["0"], ["1"]]


async def test_a_request_goes_to_an_instance_that_serves_its_model():
    base, both, any_of_them = Engine(), Engine(), Engine()
    base.models, both.models = ["base"], ["base", "adapter"]
    async with before(base, both, any_of_them) as client:
        for model, serving in {
            "base": "abc",
            "adapter": "bc",
            "other": "c",
            "": "abc",
            None: "abc",
        }.items():
            got = {await client.send(model=model) for _ in range(12)}
            assert got == {(200, name) for name in serving}, model


async def test_an_instance_that_fails_is_not_replaced_by_one_of_another_model():
    fails, other = Engine(serves=500), Engine()
    fails.models, other.models = ["a"], ["b"]
    async with before(fails, other) as client:
        assert {await client.send(model="a") for _ in range(30)} == {(500, "a")}
        assert {await client.send(model="b") for _ in range(3)} == {(200, "b")}


@pytest.mark.parametrize(
    "asked",
    [pytest.param(True, id="once_asked_for"), pytest.param(False, id="unasked")],
)
async def test_models_that_an_instance_loads_are_found(monkeypatch, asked):
    again_s, every_s = (0.0, 3600.0) if asked else (3600.0, POLL_EVERY_S)
    monkeypatch.setattr(health, "MODELS_AGAIN_S", again_s)
    monkeypatch.setattr(health, "MODELS_EVERY_S", every_s)
    engine, other = Engine(), Engine()
    engine.models, other.models = ["base"], ["other"]
    async with before(engine, other) as client, asyncio.timeout(DEADLINE_S):
        assert await client.send(model="adapter") == (404, None)
        assert engine.ranks == other.ranks == []
        engine.models = ["base", "adapter"]
        if asked:
            assert await client.send(model="adapter") == (200, "a")
        while await client.send(model="adapter") != (200, "a"):
            await asyncio.sleep(POLL_EVERY_S)


async def test_a_list_that_is_not_read_yet_is_not_the_same(monkeypatch):
    """An instance of another model that comes late is found as soon as it is up."""
    monkeypatch.setattr(health, "MODELS_EVERY_S", 3600.0)
    early, late = Engine(), Engine()
    early.models, late.models = ["a"], ["b"]
    async with AsyncExitStack() as stack:
        port = free_port()
        place = Instance("b", f"http://127.0.0.1:{port}")
        async with before(early, place) as client:
            assert await client.send(model="a") == (200, "a")
            assert (await client.send(model="b"))[0] == 503
            await stack.enter_async_context(listening(late, port))
            async with asyncio.timeout(DEADLINE_S):
                while await client.ejected():
                    await asyncio.sleep(POLL_EVERY_S)
            for _ in range(10):
                assert await client.send(model="b") == (200, "b")
                assert await client.send(model="a") == (200, "a")


async def test_a_model_that_has_moved_is_found_at_the_first_404(monkeypatch):
    monkeypatch.setattr(health, "MODELS_EVERY_S", 3600.0)
    monkeypatch.setattr(health, "MODELS_AGAIN_S", 0.0)
    old, new = Engine(), Engine()
    old.models, new.models = ["a", "m"], ["b"]
    async with before(old, new) as client:
        assert await client.send(model="m") == (200, "a")
        old.models, new.models, old.serves = ["a"], ["b", "m"], 404
        assert await client.send(model="m") == (200, "b")


async def test_instances_of_one_model_judge_others_themselves():
    """They may load an adapter that they do not list yet."""
    engines = Engine(), Engine()
    for engine in engines:
        engine.models = ["base"]
    async with before(*engines) as client:
        assert await client.send(model="adapter") == (200, "a")


# The rule for outliers in virtual time: a fleet with load, one instance of which fails.
SERVICE_S, RATE_PER_INSTANCE, WATCHED_S = 0.2, 2.5, 60.0


GOOD, BAD = b'{"prompt": [1, 2]}', b'{"prompt": [1]}'


class Trouble(NamedTuple):
    """A fault: instance `i0` fails this share of requests, so long after they came.

    It answers 500, or `breaks` a stream off after its first token. Clients send a share
    of requests that every instance refuses.
    """

    share: float
    after_s: float
    bad_requests: float = 0.0
    breaks: bool = False


TROUBLES = {
    "answers 500 at once": Trouble(1.0, 0.0),
    "answers 500 after as long as others": Trouble(1.0, SERVICE_S),
    "answers 500 at once, to half": Trouble(0.5, 0.0),
    "none; a fifth of requests is bad": Trouble(0.0, 0.0, 0.2),
    "breaks streams off after the first token": Trouble(1.0, 0.0, breaks=True),
}


class Whole:
    """An Answer that is complete."""

    streams, at_end, first = False, True, b"{}"

    def __init__(self, status: int) -> None:
        self.status, self.good = status, status == 200
        self.headers: CIMultiDict[str] = CIMultiDict()

    def close(self) -> None:
        """Do nothing: there is no connection."""


class Broken(Whole):
    """A stream that breaks off after its first token."""

    streams, at_end, first = True, False, TOKEN

    async def chunk(self) -> bytes:
        raise Lost(502, "i0", "i0 broke off")


class Virtual:
    """Instances, and clients that count their failed answers, on the virtual clock."""

    path, name = COMPLETIONS, "all"

    def __init__(self, trouble: Trouble, chance: random.Random) -> None:
        self.trouble, self.chance = trouble, chance
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.failed = self.sent = 0

    async def request(
        self, instance: Instance, path: str, headers: object, payload: bytes, *_: bool
    ) -> Whole:
        if payload == BAD:
            return Whole(400)
        fails = instance.name == "i0" and self.chance.random() < self.trouble.share
        await asyncio.sleep(self.trouble.after_s if fails else SERVICE_S)
        if fails and self.trouble.breaks:
            return Broken(200)
        return Whole(500 if fails else 200)

    async def body(self) -> Body:
        self.sent += 1
        return Body(BAD if self.chance.random() < self.trouble.bad_requests else GOOD)

    async def begin(self, status: int, *_: object) -> None:
        self.failed += status >= 500

    async def write(self, chunk: bytes) -> None:
        """Do nothing: only ends are counted."""

    async def end(self, chunk: bytes = b"") -> None:
        """Do nothing: it has been counted."""

    async def break_off(self, failure: Failure) -> None:
        self.failed += 1

    def refuse(self, failure: Failure) -> None:
        self.failed += 1


async def watched(trouble: Trouble, count: int) -> tuple[float | None, float, int]:
    """Seconds until an ejection, the share of failed answers, and the ejections."""
    loop = asyncio.get_running_loop()
    chance = random.Random(1)
    instances = [Instance(f"i{n}", "http://h:1") for n in range(count)]
    settings = resolved(instances, Settings("load_only"))
    header = DecisionsHeader(policy="load_only", instances=instances)
    fleet = Virtual(trouble, chance)
    log = DecisionLog(None, header, loop.now_ns)
    core = Core(instances, settings, fleet, log, now_ns=loop.now_ns)

    async def healthy(_: Instance) -> None:
        """Do nothing: /health is good."""

    polls = asyncio.create_task(core.health.poll_forever(healthy))
    found_s = None
    async with asyncio.TaskGroup() as requests:
        while loop.time() < WATCHED_S:
            await asyncio.sleep(chance.expovariate(RATE_PER_INSTANCE * count))
            requests.create_task(core.handle(fleet))
            if found_s is None and core.health.ejected:
                found_s = loop.time()
    polls.cancel()
    return found_s, fleet.failed / fleet.sent, core.health.ejections


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TROUBLES)
def test_an_outlier_costs_few_requests_of_a_busy_fleet(monkeypatch, name, count):
    trouble = TROUBLES[name]
    monkeypatch.setattr(health, "MIN_OUT_S", 1.0)
    monkeypatch.setattr(health, "POLL_EVERY_S", 1.0)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found_s, failed, ejections = runner.run(watched(trouble, count))
    found = "never" if found_s is None else f"{found_s:.1f} s"
    print(f"| {name} | {count} | {found} | {failed:.1%} |")
    # A stream that has begun cannot be tried again.
    assert failed < (0.03 if trouble.breaks else 0.005)
    if trouble.share:
        assert found_s is not None and found_s < 5
    else:
        assert (found_s, ejections) == (None, 0)
