# SPDX-License-Identifier: Apache-2.0
"""The proxy's side of kvindexd: what it asks, routing by events, and no long waits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from aiohttp import web
from fleet.tests.kvindexd.kvindexd_lab import needs_go
from fleet.tests.proxy.proxy_lab import (
    ask,
    post,
    proxy,
    until,
)
from tests.harness.standin.process import standin

from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.kvindexd import HASH_SEED, kvindexd
from kvtax_fleet.proxy import kvindexd as client
from kvtax_fleet.proxy.apis import APIS, COMPLETIONS
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.kvindexd import Kvindexd
from kvtax_fleet.proxy.settings import SettingsError
from kvtax_fleet.records.instances import Instance

PROMPT = [1, 22, 333]


class Fake:
    """Answers as kvindexd does, or as `answer` says."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.checked = 0
        self.answer: Callable[[], Awaitable[web.Response]] = self.holdings

    async def holdings(self) -> web.Response:
        instances = [{"name": "b", "tokens": 32}, {"name": "a", "tokens": 16}]
        answer = {"instances": instances}
        several = self.asked and self.asked[-1][1].startswith(b'{"prompts"')
        return web.json_response({"answers": [answer]} if several else answer)

    async def lookup(self, request: web.Request) -> web.Response:
        if (sent := await request.read()) == b"[1]":
            self.checked += 1
        else:
            self.asked.append((dict(request.query), sent))
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


def test_ids_are_asked_as_the_client_wrote_them(tmp_path):
    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        assert await asked.cached_tokens(body()) == {"a": 16, "b": 32}
        await asked.cached_tokens(body(cache_salt='s"&', model="adapter"))
        await asked.cached_tokens(body(cache_salt=7, model=None))
        sent = json.dumps(PROMPT).encode()
        assert fake.asked == [
            ({"model": "m"}, sent),
            ({"model": "adapter", "cache_salt": 's"&'}, sent),
            ({}, sent),
        ]
        long = "s" * 100_000
        assert await asked.cached_tokens(body(cache_salt=long)) == {"a": 16, "b": 32}
        prompt = {"model": "m", "cache_salt": long, "token_ids": PROMPT}
        assert json.loads(fake.asked.pop()[1]) == {"prompts": [prompt]}
        text = body(prompt="text")
        assert await asked.cached_tokens(text) is None
        assert len(fake.asked) == 3
        assert asked.unanswered == 0

    run(tmp_path, scenario)


def test_states_are_those_of_healthz(tmp_path):
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
    tmp_path, answer, monkeypatch
):
    # On a busy machine a true answer may take as long as one that never comes may.
    monkeypatch.setattr(client, "TIMEOUT_S", 2 if answer is hang else 30)
    monkeypatch.setattr(client, "PAUSE_S", 0.5)

    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        fake.answer = answer
        assert await asked.cached_tokens(body()) is None
        assert await asked.cached_tokens(body()) is None
        assert len(fake.asked) == 1
        assert fake.checked == 2  # at the start, and whether it was this prompt alone
        assert asked.unanswered == 2
        fake.answer = fake.holdings
        await asyncio.sleep(0.5)
        assert await asked.cached_tokens(body()) == {"a": 16, "b": 32}

    run(tmp_path, scenario)


def test_a_prompt_that_alone_is_not_answered_costs_the_others_nothing(tmp_path):
    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        async def fail_one() -> web.Response:
            fake.answer = fake.holdings
            return web.Response(status=500)

        fake.answer = fail_one
        assert await asked.cached_tokens(body()) is None
        assert await asked.cached_tokens(body()) == {"a": 16, "b": 32}
        assert asked.unanswered == 1

    run(tmp_path, scenario)


@pytest.mark.parametrize("status", [400, 413, 414, 431])
def test_a_prompt_that_is_refused_costs_the_others_nothing(tmp_path, status):
    async def scenario(fake: Fake, asked: Kvindexd) -> None:
        async def refuse() -> web.Response:
            return web.Response(status=status)

        fake.answer = refuse
        assert await asked.cached_tokens(body()) is None
        fake.answer = fake.holdings
        assert await asked.cached_tokens(body()) == {"a": 16, "b": 32}
        assert asked.unanswered == 0

    run(tmp_path, scenario)


def test_a_kvindexd_of_other_instances_is_refused(tmp_path):
    async def scenario(*_: object) -> None:
        raise AssertionError

    with pytest.raises(SettingsError, match="does not follow 'c'"):
        run(tmp_path, scenario, names="abc")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://h:1", "unix:///PATH or tcp://HOST:PORT"),
        ("unix://", "unix:///PATH or tcp://HOST:PORT"),
        ("tcp://h:99999", "Port out of range"),
        ("unix:///nowhere/at/all", "no kvindexd answers"),
        ("tcp://127.0.0.1:1", "no kvindexd answers"),
    ],
)
def test_an_address_where_nobody_answers_is_refused(address, said):
    async def open_it() -> None:
        async with Kvindexd(address, ["a"]):
            raise AssertionError

    with pytest.raises(SettingsError, match=said):
        asyncio.run(open_it())


BLOCK = 4


def sha256(value: object) -> bytes:
    """vllm/utils/hashing.py."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


class Publisher:
    """The KV events of an instance and their replay, as vLLM 0.28 has them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.events = f"ipc://{folder}/{name}"
        self.replay = f"{self.events}.replay"
        self._sent: list[tuple[bytes, bytes, bytes]] = []
        context = zmq.Context.instance()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(self.events)
        self._router.bind(self.replay)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def store(self, ids: list[int]) -> None:
        """The blocks of a prompt."""
        hashes = [sha256(HASH_SEED)]
        for start in range(0, len(ids), BLOCK):
            block = tuple(ids[start : start + BLOCK])
            hashes.append(sha256((hashes[-1], block, None)))
        self.publish(
            type="BlockStored",
            block_hashes=hashes[1:],
            parent_block_hash=None,
            token_ids=ids,
            block_size=BLOCK,
        )

    def publish(self, **event: object) -> None:
        number = len(self._sent).to_bytes(8, "big")
        payload = msgspec.msgpack.encode([time.time(), [event]])
        self._sent.append((b"", number, payload))
        self._pub.send_multipart(self._sent[-1])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pub.close(0)
        self._router.close(0)

    def _repeat(self) -> None:
        end = b"", (-1).to_bytes(8, "big", signed=True), b""
        while not self._stop.is_set():
            if self._router.poll(20):
                client, _, first = self._router.recv_multipart()
                for one in [*self._sent[int.from_bytes(first, "big") :], end]:
                    self._router.send_multipart((client, b"", *one))


@contextmanager
def two(folder: Path) -> Iterator[tuple[list[Instance], Publisher]]:
    """Instances a and b, and the events of b."""
    publishers = [Publisher(folder, name) for name in "ab"]
    try:
        with standin() as a, standin() as b:
            instances = [
                Instance(
                    name,
                    at.url,
                    kv_events=one.events,
                    kv_events_replay=one.replay,
                )
                for name, at, one in zip("ab", (a, b), publishers, strict=True)
            ]
            yield instances, publishers[1]
    finally:
        for one in publishers:
            one.close()


@contextmanager
def following(folder: Path, instances: list[Instance], *flags: str) -> Iterator[str]:
    """The address of a kvindexd that follows the instances."""
    write_instances(folder / "instances.json", instances)
    log = folder / "kvindexd.log"
    with kvindexd(folder / "instances.json", log, *flags) as address:
        yield address


@pytest.mark.slow
@needs_go
def test_a_salt_of_any_length_switches_nothing_off(tmp_path):
    with (
        two(tmp_path) as (instances, _),
        following(tmp_path, instances) as address,
        proxy(tmp_path, instances, "lmetric", "--kvindexd", address) as on,
    ):
        for name, fields in (
            ("a", {}),
            ("b", {"cache_salt": "s" * 100_000}),
            ("c", {}),
        ):
            assert post(on.url, ask(**fields), X_Request_Id=name).status == 200
        on.end("c")
        assert [line["cache"] for line in on.lines("decision")] == ["exact"] * 3


@pytest.mark.slow
@needs_go
def test_ids_are_routed_by_the_events_and_text_says_that_it_is_not(tmp_path):
    prompt = list(range(40))
    with two(tmp_path) as (instances, publisher):
        publisher.store(prompt)
        with (
            following(tmp_path, instances) as address,
            proxy(tmp_path, instances, "lmetric", "--kvindexd", address) as on,
        ):
            until(
                lambda: on.instances()["b"]["cache"]["exact_tokens"] == 40,
                "the events of before did not arrive",
            )
            assert post(on.url, ask(prompt), X_Request_Id="ids").status == 200
            assert post(on.url, ask("words " * 40), X_Request_Id="text").status == 200
            on.end("text")
            ids, text = on.lines("decision")
            cached = [one["cached_tokens"] for one in ids["snapshot"]["candidates"]]
            assert (ids["cache"], ids["instance"], cached) == ("exact", "b", [0, 36])
            assert (text["cache"], text["form"]) == ("mirror", "text")
            cache = on.instances()["b"]["cache"]
            assert cache["mirror_minus_exact_tokens"] == -40
            assert (cache["mean_difference_tokens"], cache["compared_prompts"]) == (
                36,
                1,
            )
            assert cache["complete"]
            publisher.publish(type="AllBlocksCleared")
            until(
                lambda: (
                    b'kvtax_proxy_cache_exact_tokens{instance="b"} 0.0'
                    in on.get("/metrics").body
                ),
                "the reset did not arrive",
            )


@pytest.mark.slow
@needs_go
def test_a_kvindexd_that_ends_costs_no_request(tmp_path):
    with two(tmp_path) as (instances, _):
        gone = following(tmp_path, instances)
        address = gone.__enter__()
        with proxy(tmp_path, instances, "lmetric", "--kvindexd", address) as on:
            assert post(on.url, ask(), X_Request_Id="before").status == 200
            gone.__exit__(None, None, None)
            assert post(on.url, ask(), X_Request_Id="after").status == 200
            on.end("after")
            assert [line["cache"] for line in on.lines("decision")] == [
                "exact",
                "mirror",
            ]
            assert b"kvtax_proxy_unanswered_total 1.0" in on.get("/metrics").body
