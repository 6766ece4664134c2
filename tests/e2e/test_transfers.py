# SPDX-License-Identifier: Apache-2.0
"""A pair's greedy tokens equal a single instance's, so what is pulled is the KV.

Both instances of a pair are kv_both. One has the fixes and the other is upstream's, as
in a fleet that is patched one instance after the other, and each case runs in both
directions.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import pytest

from kvtax.proc.ports import reserve
from tests.harness.tiny import (
    BLOCK_TOKENS,
    Answer,
    Counters,
    Reference,
    RequestFailed,
    TinyServer,
    TinyServers,
    Tokens,
    aborted,
    occupied,
    prompt,
    ready,
)
from tests.releases import INSTALLED

pytestmark = pytest.mark.e2e


async def route(connector: str, p: TinyServer, d: TinyServer, prompt: Tokens) -> Answer:
    """D's answer to a prompt that P has prefilled. Raises RequestFailed."""
    if connector == "nixl":
        prefilled = await p.complete(prompt, 1, {"do_remote_decode": True})
        return await d.complete(prompt, kv_transfer_params=prefilled.kv_transfer_params)
    transfer_id = uuid.uuid4().hex
    pull = await pull_params(p, transfer_id)
    answer, _ = await asyncio.gather(
        d.complete(prompt, kv_transfer_params=pull),
        p.complete(prompt, 1, send_params(transfer_id)),
    )
    return answer


def send_params(transfer_id: str) -> dict[str, Any]:
    """Parameters that make a Mooncake P hold the prompt's KV until it is pulled."""
    return {"do_remote_decode": True, "transfer_id": transfer_id}


async def pull_params(p: TinyServer, transfer_id: str) -> dict[str, Any]:
    """Parameters that make a Mooncake D pull from `p`, from its bootstrap server."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{p.bootstrap_url}/query") as answer,
    ):
        ranks = await answer.json()
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": p.bootstrap_url,
        "remote_engine_id": ranks["0"]["engine_id"],
    }


@dataclass(frozen=True)
class Bench:
    """`d` recomputes what it cannot pull; `foreign` has other weights."""

    p: TinyServer
    d: TinyServer
    foreign: TinyServer
    reference: Reference

    async def right(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens == expected

    async def pulls(self, p: TinyServer, d: TinyServer, seed: int) -> None:
        asked = prompt(seed, 500)
        before = await d.counters()
        await self.right(route("mooncake", p, d, asked), asked)
        await d.has(pulled_tokens=before.pulled_tokens + 500)

    async def well(self, seed: int) -> None:
        """Neither side holds anything, and transfers go on."""
        # In this order: once P holds nothing, D has had its answer.
        await self.p.settle()
        await self.d.settle()
        await self.pulls(self.p, self.d, seed)


async def pulling(
    p: TinyServer, d: TinyServer, asked: Tokens, transfer_id: str
) -> asyncio.Task:
    """D's answer to come, for which it pulls from P."""
    params = await pull_params(p, transfer_id)
    return asyncio.create_task(d.complete(asked, kv_transfer_params=params))


async def abort_unscheduled_pull(p: TinyServer, d: TinyServer, seed: int) -> None:
    """Have `d`, which takes no more, given a pull from `p` that is then aborted."""
    asked, transfer_id = prompt(seed, 500), uuid.uuid4().hex
    await p.complete(asked, 1, send_params(transfer_id))
    pull = await pulling(p, d, asked, transfer_id)
    await d.has(waiting=1)
    await aborted(pull)
    await d.has(waiting=0)


@asynccontextmanager
async def stuck_send(
    p: TinyServer, d: TinyServer, asked: Tokens
) -> AsyncIterator[asyncio.Task]:
    """P in the middle of sending to D, which is stopped; yields D's answer to come.

    The transfer engines must know each other already.
    """
    transfer_id = uuid.uuid4().hex
    # P waits for a prompt as long as for an aborted one, so it must be soon prefilled.
    await p.complete(asked, 1)
    waiting = (await d.counters()).waiting
    pull = await pulling(p, d, asked, transfer_id)
    await d.has(waiting=waiting + 1)
    # Steps of D wait for its event loop. The request to P needs many of its turns:
    # a new socket has its handshake first, and a stopped D would not end it.
    await d.complete([0], 32)
    with d.stopped():
        await p.complete(asked, 1, send_params(transfer_id))
        await d.has_unread(2**15)
        yield pull


LENGTHS = [
    1,
    2,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    2 * BLOCK_TOKENS,
    1000,
    4001,
]
PREFIX_TOKENS = 32 * BLOCK_TOKENS
# D computes the last token of a prompt again, to sample the next one from it. Only old
# releases count it among the computed ones, too, and a prompt of one token as cached.
COUNTS_AGAIN = INSTALLED == "0.18.1"


@dataclass(frozen=True)
class Pair:
    connector: str
    instances: tuple[TinyServer, TinyServer]
    reference: Reference

    async def check(self, p: TinyServer, d: TinyServer, prompts: list[Tokens]) -> None:
        """`prompts`, all at once, are answered as by a single instance."""
        expected = await self.reference.tokens(prompts)
        routes = (route(self.connector, p, d, prompt) for prompt in prompts)
        answers = await asyncio.gather(*routes)
        assert [answer.tokens for answer in answers] == expected


@pytest.fixture(scope="module", params=["mooncake", "nixl"])
def pair(request, lab: TinyServers, reference: Reference) -> Iterator[Pair]:
    both = (lab.instance(request.param, patched=patched) for patched in (False, True))
    with ready(*both) as instances:
        yield Pair(request.param, instances, reference)


@pytest.fixture(params=[1, -1], ids=["forth", "back"])
def direction(request) -> int:
    return request.param


async def test_tokens_are_those_of_a_single_instance_at_every_length(pair, direction):
    p, d = pair.instances[::direction]
    before_p, before_d = await p.counters(), await d.counters()
    for length in LENGTHS:
        await pair.check(p, d, [prompt(direction * 10_000 + length, length)])
    total, cached = sum(LENGTHS), int(COUNTS_AGAIN)
    # A prompt of one token is not pulled.
    again = len(LENGTHS) if COUNTS_AGAIN else 1
    await counted(d, before_d, total - 1, computed=again, cached=cached)
    await counted(p, before_p, computed=total, cached=cached)
    await asyncio.gather(p.settle(), d.settle())


async def test_only_what_the_decode_side_has_not_cached_is_pulled(pair, direction):
    p, d = pair.instances[::direction]
    before = await d.counters()
    shared = prompt(direction * 20_000, PREFIX_TOKENS)
    tails = [prompt(direction * 20_000 + i, i * 5) for i in range(1, 6)]
    await pair.check(p, d, [shared + tails[0]])
    await pair.check(p, d, [shared + tail for tail in tails[1:]])
    await counted(
        d,
        before,
        pulled=PREFIX_TOKENS + sum(map(len, tails)),
        computed=COUNTS_AGAIN * len(tails),
        cached=PREFIX_TOKENS * (len(tails) - 1),
    )
    await asyncio.gather(p.settle(), d.settle())


async def test_sixteen_at_once_in_both_directions(pair):
    first, other = pair.instances
    before = [await first.counters(), await other.counters()]
    forth = [prompt(30_000 + i, 40 + 61 * i) for i in range(8)]
    back = [prompt(40_000 + i, 33 + 47 * i) for i in range(8)]
    await asyncio.gather(
        pair.check(first, other, forth), pair.check(other, first, back)
    )
    forth_tokens, back_tokens = sum(map(len, forth)), sum(map(len, back))
    await counted(
        first, before[0], back_tokens, forth_tokens + COUNTS_AGAIN * len(back)
    )
    await counted(
        other, before[1], forth_tokens, back_tokens + COUNTS_AGAIN * len(forth)
    )
    await asyncio.gather(first.settle(), other.settle())


async def counted(
    instance: TinyServer,
    before: Counters,
    pulled: int = 0,
    computed: int = 0,
    cached: int = 0,
) -> None:
    """Raises AssertionError unless these are the prompt tokens since `before`."""
    # The counters come a moment after the answer.
    for _ in range(3000):
        since = await instance.counters() - before
        tokens = (since.pulled_tokens, since.computed_tokens, since.cached_tokens)
        if tokens == (pulled, computed, cached):
            return
        await asyncio.sleep(0.02)
    assert tokens == (pulled, computed, cached)


# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
TIMEOUT_S = 8
MAX_SEQS = 4
# 31 MiB of KV: more than the kernel buffers for a receiver that does not read.
LONG_TOKENS = 8000


@pytest.fixture(scope="module")
def start(lab: TinyServers) -> Callable[..., TinyServer]:
    return partial(
        lab.instance,
        "mooncake",
        env={"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(TIMEOUT_S)},
        max_num_seqs=MAX_SEQS,
    )


@pytest.fixture(scope="module")
def bench(lab: TinyServers, start, reference: Reference) -> Iterator[Bench]:
    with ready(
        start("kv_producer", patched=True),
        start("kv_consumer", patched=True, on_load_failure="recompute"),
        start("kv_both", patched=True, checkpoint=lab.other_weights),
    ) as instances:
        yield Bench(*instances, reference)


async def test_other_weights_on_the_prefill_side_are_noticed(bench):
    # D computes what it cannot pull in time, and a first pull takes longest.
    await route("mooncake", bench.foreign, bench.d, prompt(59_999, 500))
    for seed, length in enumerate((2, 17, 1000, 4001)):
        asked = prompt(60_000 + seed, length)
        (expected,) = await bench.reference.tokens([asked])
        # Or D would wait for the prefill, too.
        await bench.foreign.complete(asked, 1)
        answer = await route("mooncake", bench.foreign, bench.d, asked)
        assert answer.tokens != expected
    await asyncio.gather(bench.foreign.settle(), bench.d.settle())


async def test_abort_before_it_is_scheduled(bench):
    expired = expirations(bench.p)
    async with occupied(bench.d, MAX_SEQS):
        await abort_unscheduled_pull(bench.p, bench.d, seed=61_000)
        await bench.p.settle()
    assert expirations(bench.p) == expired
    await bench.well(seed=61_001)


async def test_abort_while_it_waits_for_remote_kv(bench):
    prompts = [prompt(62_000 + i, 500) for i in range(2)]
    ids = [uuid.uuid4().hex for _ in prompts]
    pulls = [
        await pulling(bench.p, bench.d, asked, transfer_id)
        for asked, transfer_id in zip(prompts, ids, strict=True)
    ]
    await bench.d.has(waiting=2)
    for pull in pulls:
        await aborted(pull)
    # The first is sent all the same, the second never.
    await bench.p.complete(prompts[0], 1, send_params(ids[0]))
    await bench.well(seed=62_002)


async def test_abort_on_the_prefill_side_lets_the_decode_side_go_on_at_once(bench):
    asked, transfer_id = prompt(63_000, 500), uuid.uuid4().hex
    await bench.reference.tokens([asked])
    expired = expirations(bench.p)
    async with occupied(bench.p, MAX_SEQS):
        send = asyncio.create_task(bench.p.complete(asked, 1, send_params(transfer_id)))
        await bench.p.has(waiting=1)
        pull = await pulling(bench.p, bench.d, asked, transfer_id)
        await bench.d.has(waiting=1)
        await aborted(send)
        await bench.right(pull, asked)
    assert expirations(bench.p) == expired
    await bench.well(seed=63_001)


async def test_abort_while_the_prefill_side_is_sending(bench):
    asked = prompt(64_000, LONG_TOKENS)
    await bench.pulls(bench.p, bench.d, seed=64_001)
    with ExitStack() as halt:
        async with stuck_send(bench.p, bench.d, asked) as pull:
            halt.enter_context(bench.p.stopped())
        await aborted(pull)
        await bench.d.has(waiting=0)
        # The rest may still arrive, so its blocks must not go to another request.
        await bench.d.complete([0], 2)
        assert (await bench.d.counters()).used_blocks == LONG_TOKENS // BLOCK_TOKENS
    await bench.well(seed=64_002)


async def test_bootstrap_server_gone(bench):
    """Nothing listens there, or it does not answer, or it knows another engine."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        known = await pull_params(bench.p, "")
        closed_port = reserve(1)[0].http
        gone = [
            {"remote_bootstrap_addr": f"http://127.0.0.1:{closed_port}"},
            {"remote_bootstrap_addr": address(silent)},
            {},
        ]
        before = await bench.d.counters()
        for number, difference in enumerate(gone):
            params = known | difference | {"remote_engine_id": uuid.uuid4().hex}
            params["transfer_id"] = uuid.uuid4().hex
            asked = prompt(65_000 + number, 500)
            await bench.right(bench.d.complete(asked, 16, params), asked)
        since = await bench.d.counters() - before
        assert since.pulled_tokens == 0
    await bench.well(seed=65_003)


async def test_prefill_side_stopped_past_its_timeout(bench):
    asked, transfer_id = prompt(66_000, 500), uuid.uuid4().hex
    unsent = prompt(66_001, 500)
    await bench.p.complete(unsent, 1, send_params("unsent"))
    late = await pull_params(bench.p, "unsent")
    pull = await pulling(bench.p, bench.d, asked, transfer_id)
    await bench.d.has(waiting=1)
    with bench.p.stopped():
        send = asyncio.create_task(bench.p.complete(asked, 1, send_params(transfer_id)))
        await asyncio.sleep(TIMEOUT_S + 1)
    await bench.right(pull, asked)
    await send
    # What nobody pulled has expired; a late pull must not get what is there now.
    await bench.p.settle()
    await bench.right(bench.d.complete(unsent, 16, late), unsent)
    await bench.well(seed=66_002)


async def test_prefill_side_stopped_while_sending(bench):
    """D keeps the blocks as long as P may write to them, and goes on serving."""
    await route("mooncake", bench.foreign, bench.d, prompt(70_000, 500))
    # From other weights, so that a late write into another's blocks would show.
    asked = prompt(70_001, 4000)
    others = [prompt(70_002 + i, LONG_TOKENS) for i in range(2)]
    await bench.reference.tokens(others)
    with ExitStack() as halt:
        async with stuck_send(bench.foreign, bench.d, asked) as pull:
            halt.enter_context(bench.foreign.stopped())
        await asyncio.sleep(TIMEOUT_S + 1)
        # More blocks than there are beside those of the pull.
        for other in others:
            await bench.right(bench.d.complete(other), other)
        assert not pull.done()
        held = (await bench.d.counters()).used_blocks
        assert held >= len(asked) // BLOCK_TOKENS
    await pull
    for other in others:
        await bench.right(bench.d.complete(other), other)
    await bench.foreign.settle()
    await bench.d.settle()


@pytest.mark.long  # tests/patched/test_abort_race.py shows it in the engine alone
async def test_without_the_fix_an_abort_before_scheduling_is_the_end_of_the_engine(
    bench, start
):
    with ready(start("kv_both")) as (unfixed,):
        with suppress(RequestFailed):
            async with occupied(unfixed, MAX_SEQS):
                await abort_unscheduled_pull(bench.foreign, unfixed, seed=67_000)
                await bench.foreign.settle()
        with pytest.raises(RequestFailed):
            await unfixed.settle()
        log = unfixed.log.read_text()
    assert "in _update_from_kv_xfer_finished" in log
    assert "AssertionError" in log


async def test_by_default_a_failed_pull_fails_its_request_alone(bench):
    closed_port = reserve(1)[0].http
    params = {
        "do_remote_prefill": True,
        "transfer_id": "none",
        "remote_engine_id": "none",
        "remote_bootstrap_addr": f"http://127.0.0.1:{closed_port}",
    }
    with pytest.raises(RequestFailed, match="500"):
        await bench.foreign.complete(prompt(71_000, 500), 16, params)
    await bench.foreign.settle()


def test_the_defence_in_the_scheduler_was_not_needed(bench):
    """The connector itself must report nothing wrong."""
    for instance in (bench.p, bench.d, bench.foreign):
        assert "No request waits for the KV transfer" not in instance.log.read_text()


def expirations(p: TinyServer) -> int:
    """How often P gave up waiting: for a puller, or for what a puller waits for."""
    log = p.log.read_text()
    return sum(map(log.count, ("without being sent", "Timeout waiting for P side")))


def address(server: socket.socket) -> str:
    return "http://{}:{}".format(*server.getsockname())
