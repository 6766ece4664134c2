# SPDX-License-Identifier: Apache-2.0
"""The proxy's side of kvindexd: what it asks, and that no request waits for it long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from fleet.proxy import kvindexd
from fleet.proxy.apis import APIS, COMPLETIONS
from fleet.proxy.body import Body
from fleet.proxy.kvindexd import Kvindexd
from fleet.proxy.settings import SettingsError

PROMPT = [1, 22, 333]


class Fake:
    """Answers as kvindexd does, or as `answer` says."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[], Awaitable[web.Response]] = self.holdings

    async def holdings(self) -> web.Response:
        instances = [{"name": "b", "tokens": 32}, {"name": "a", "tokens": 16}]
        return web.json_response({"instances": instances})

    async def lookup(self, request: web.Request) -> web.Response:
        self.asked.append((dict(request.query), await request.read()))
        return await self.answer()

    async def health(self, _: web.Request) -> web.Response:
        state = {"complete": True, "gaps": 1, "skipped_blocks": 2, "block_tokens": 16}
        blocks = {"GPU": 3, "CPU": 5}
        instances = [{"name": name, "blocks": blocks} | state for name in "ba"]
        return web.json_response({"instances": instances})

    async def serve(self, path: Path) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/lookup", self.lookup)
        app.router.add_get("/healthz", self.health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        return runner


def body(**fields: object) -> Body:
    asked = {"model": "m", "prompt": PROMPT} | fields
    return Body(json.dumps(asked).encode(), APIS[COMPLETIONS])


def run(
    folder: Path, scenario: Callable[[Fake, Kvindexd], Awaitable[None]], names="ab"
) -> None:
    async def whole() -> None:
        fake = Fake()
        runner = await fake.serve(folder / "socket")
        try:
            async with Kvindexd(f"unix://{folder}/socket", list(names)) as asked:
                await scenario(fake, asked)
        finally:
            await runner.cleanup()

    asyncio.run(whole())


def test_ids_are_asked_as_the_client_wrote_them(tmp_path: Path) -> None:
    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        assert await asked.cached_tokens(body()) == [16, 32]
        await asked.cached_tokens(body(cache_salt='s"&', model="adapter"))
        await asked.cached_tokens(body(cache_salt=7, model=None))
        sent = json.dumps(PROMPT).encode()
        assert fake.asked == [
            ({"model": "m"}, sent),
            ({"model": "adapter", "cache_salt": 's"&'}, sent),
            ({}, sent),
        ]
        text = body(prompt="text")
        assert await asked.cached_tokens(text) is None
        assert len(fake.asked) == 3
        text.take_ids(b"[5,6]")
        assert await asked.cached_tokens(text) == [16, 32]
        assert fake.asked[3] == ({"model": "m"}, b"[5,6]")
        assert asked.unanswered == 0

    run(tmp_path, scenario)


def test_states_are_those_of_healthz(tmp_path: Path) -> None:
    async def scenario(_: Fake, asked: Kvindexd) -> None:
        states = await asked.states()
        assert states.keys() == {"a", "b"}
        assert (states["a"].tokens, states["a"].gaps) == (48, 1)

    run(tmp_path, scenario)


async def hang() -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def fail() -> web.Response:
    return web.Response(status=500)


async def garble() -> web.Response:
    return web.Response(body=b"no JSON")


@pytest.mark.slow
@pytest.mark.parametrize("answer", [hang, fail, garble])
def test_without_an_answer_the_next_prompts_do_not_wait_for_one(
    tmp_path: Path, answer, monkeypatch
) -> None:
    # On a busy machine a true answer may take as long as one that never comes may.
    monkeypatch.setattr(kvindexd, "TIMEOUT_S", 2 if answer is hang else 30)
    monkeypatch.setattr(kvindexd, "PAUSE_S", 0.5)

    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        fake.answer = answer
        assert await asked.cached_tokens(body()) is None
        assert await asked.cached_tokens(body()) is None
        assert len(fake.asked) == 1
        assert asked.unanswered == 2
        fake.answer = fake.holdings
        await asyncio.sleep(0.5)
        assert await asked.cached_tokens(body()) == [16, 32]

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [400, 413])
def test_a_prompt_that_is_refused_costs_the_others_nothing(
    tmp_path: Path, status: int
) -> None:
    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        async def refuse() -> web.Response:
            return web.Response(status=status)

        fake.answer = refuse
        assert await asked.cached_tokens(body()) is None
        fake.answer = fake.holdings
        assert await asked.cached_tokens(body()) == [16, 32]
        assert asked.unanswered == 0

    run(tmp_path, scenario)


def test_a_kvindexd_of_other_instances_is_refused(tmp_path: Path) -> None:
    async def scenario(*_: object) -> None:
        raise AssertionError

    with pytest.raises(SettingsError, match="does not follow 'c'"):
        run(tmp_path, scenario, names="abc")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://h:1", "unix:///PATH or tcp://HOST:PORT"),
        ("unix://", "unix:///PATH or tcp://HOST:PORT"),
        ("unix:///nowhere/at/all", "no kvindexd answers"),
        ("tcp://127.0.0.1:1", "no kvindexd answers"),
    ],
)
def test_an_address_where_nobody_answers_is_refused(address: str, said: str) -> None:
    async def open_it() -> None:
        async with Kvindexd(address, ["a"]):
            raise AssertionError

    with pytest.raises(SettingsError, match=said):
        asyncio.run(open_it())
