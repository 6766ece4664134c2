# SPDX-License-Identifier: Apache-2.0
"""B reads A's prefix cache, whatever A does: every answer has the right tokens."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from connectors.direct_read.client import Client
from connectors.direct_read.protocol import Offer, Peer
from connectors.direct_read.server import Server
from kvtax.engine.environment import DIRECT_READ_SECRET
from kvtax.proc.ports import reserve
from tests.e2e.gated_servers import (
    PROGRESS_TIMEOUT_S,
    GatedServer,
    direct_read_overlay,
    named,
)
from tests.e2e.gates import (
    LOOKUP,
    MID_READ,
    OFFER_IN_FLIGHT,
    READ,
    STEP,
    TRUST_ALL,
    VALIDATE,
)
from tests.harness.tiny import (
    BLOCK_TOKENS,
    SETTLE_DEADLINE_S,
    Answer,
    Reference,
    TinyServers,
    Tokens,
    aborted,
    prompt,
    ready,
)

# Blocks of A: two prompts of LONG_TOKENS are more than it can cache.
SMALL_BLOCKS = 300
LONG_TOKENS = 4001
# Where B can be held in a pull, in order.
MOMENTS = [LOOKUP, READ, MID_READ, VALIDATE]


@dataclass(frozen=True)
class ReadBench:
    """`b` reads from `a`; `foreign` has other weights under another name.

    `a` has its connector in a MultiConnector, and a small cache; `b` has the same
    checkpoint at another path.
    """

    a: GatedServer
    b: GatedServer
    foreign: GatedServer
    reference: Reference

    async def prepare(self, asked: Tokens) -> None:
        """Have A cache it, and the reference know what follows."""
        await asyncio.gather(self.reference.tokens([asked]), self.a.complete(asked, 1))

    def ask(self, asked: Tokens, peer: dict[str, Any] | None = None) -> Awaitable:
        return self.b.complete(asked, kv_transfer_params=peer or self.a.peer)

    async def right(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens == expected

    async def wrong(self, answer: Awaitable[Answer], asked: Tokens) -> None:
        """For negative controls."""
        (expected,) = await self.reference.tokens([asked])
        assert (await answer).tokens != expected

    @asynccontextmanager
    async def pulled(self, blocks: int) -> AsyncIterator[None]:
        """B has pulled so many blocks, as vLLM counts and as the connector does."""
        before = await self.counted()
        yield
        await self.b.settle()
        since = [
            now - then for now, then in zip(await self.counted(), before, strict=True)
        ]
        assert since == [blocks * BLOCK_TOKENS, blocks], f"{since} of {blocks} blocks"

    async def counted(self) -> tuple[int, int]:
        """Tokens that B has pulled, and blocks."""
        pulled_tokens = (await self.b.counters()).pulled_tokens
        return pulled_tokens, await self.b.count("blocks_pulled")

    async def well(self, seed: int) -> None:
        """B holds nothing, and reads from A: the first time unless A has failed it.

        Then it leaves A alone for a while, and so may Mooncake.
        """
        await self.b.settle()
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        pulled = 0
        while not pulled:
            assert time.monotonic() < deadline_s
            seed += 1
            asked = prompt(seed, 500)
            await self.prepare(asked)
            before, _ = await self.counted()
            await self.right(self.ask(asked), asked)
            await self.b.settle()
            pulled = (await self.counted())[0] - before
        assert pulled == full_blocks(asked) * BLOCK_TOKENS


async def evict_all(bench: ReadBench, seed: int) -> None:
    for number in range(2):
        await bench.a.complete(prompt(seed + number, LONG_TOKENS), 1)


def full_blocks(asked: Tokens) -> int:
    """How many blocks of it can be pulled: the last token is computed."""
    return (len(asked) - 1) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def bench(lab: TinyServers, reference: Reference) -> Iterator[ReadBench]:
    overlay = direct_read_overlay(lab)
    elsewhere = shutil.copytree(lab.checkpoint, lab.folder / "elsewhere")
    with ready(
        GatedServer(lab, overlay, "read_a", num_blocks=SMALL_BLOCKS, multi=True),
        GatedServer(lab, overlay, "read_b", checkpoint=elsewhere),
        GatedServer(
            lab,
            overlay,
            "read_foreign",
            checkpoint=lab.other_weights,
            num_blocks=SMALL_BLOCKS,
            name_of_model="foreign",
        ),
    ) as instances:
        yield ReadBench(*instances, reference)


pytestmark = pytest.mark.long

LENGTHS = [
    1,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    2 * BLOCK_TOKENS,
    1000,
    LONG_TOKENS,
]


@pytest.mark.parametrize("length", LENGTHS)
async def test_all_full_blocks_are_pulled(bench, length):
    asked = prompt(90_000 + length, length)
    await bench.prepare(asked)
    computed = (await bench.b.counters()).computed_tokens
    async with bench.pulled(full_blocks(asked)):
        await bench.right(bench.ask(asked), asked)
        left = length - full_blocks(asked) * BLOCK_TOKENS
        await bench.b.has(computed_tokens=computed + left)


async def test_nothing_is_pulled_of_what_the_peer_does_not_have(bench):
    asked = prompt(101_000, 500)
    async with bench.pulled(0):
        await bench.right(bench.ask(asked), asked)


async def test_what_the_peer_has_half_of_is_pulled_by_half(bench):
    asked = prompt(102_000, 1000)
    await bench.prepare(asked[:500])
    async with bench.pulled(500 // BLOCK_TOKENS):
        await bench.right(bench.ask(asked), asked)


async def test_what_is_here_is_not_pulled(bench):
    asked = prompt(103_000, 1000)
    await bench.prepare(asked)
    await bench.b.complete(asked[:400], 1)
    async with bench.pulled(full_blocks(asked) - 400 // BLOCK_TOKENS):
        await bench.right(bench.ask(asked), asked)


async def test_many_at_once_in_both_directions(bench):
    forth = [prompt(104_000 + i, 40 + 61 * i) for i in range(6)]
    back = [prompt(104_100 + i, 33 + 47 * i) for i in range(6)]
    await asyncio.gather(*map(bench.prepare, forth))
    await asyncio.gather(*(bench.b.complete(each, 1) for each in back))
    async with bench.pulled(sum(map(full_blocks, forth))):
        await asyncio.gather(
            *(bench.right(bench.ask(each), each) for each in forth),
            *(
                bench.right(
                    bench.a.complete(each, kv_transfer_params=bench.b.peer), each
                )
                for each in back
            ),
        )
    await bench.a.settle()
    pulled = await bench.a.count("blocks_pulled")
    assert pulled == sum(map(full_blocks, back))


async def test_preempted_after_a_pull(bench):
    """A pulls, and runs out of blocks during the last answers."""
    # Each needs one more block for the second token of its answer.
    length = (SMALL_BLOCKS // 3 - 1) * BLOCK_TOKENS
    three = [prompt(104_200 + i, length) for i in range(3)]
    await bench.reference.tokens(three)
    for each in three:
        await bench.b.complete(each, 1)
    pulled = await bench.a.count("blocks_pulled")
    preemptions = await bench.a.metric("vllm:num_preemptions_total")
    pulls = asyncio.gather(
        *(bench.a.complete(each, kv_transfer_params=bench.b.peer) for each in three)
    )
    # Together: none is done before all of them have blocks and have read.
    async with bench.a.held_at(VALIDATE, pulls):
        await bench.a.has_used(sum(map(full_blocks, three)) / (SMALL_BLOCKS - 1))
        await asyncio.sleep(0.3)
    answers = await pulls
    expected = await bench.reference.tokens(three)
    assert [answer.tokens for answer in answers] == expected
    await bench.a.settle()
    assert await bench.a.metric("vllm:num_preemptions_total") > preemptions
    pulled = await bench.a.count("blocks_pulled") - pulled
    assert pulled == sum(map(full_blocks, three))


async def test_pulls_leave_room_for_each_other(bench):
    """A has blocks for what two requests pull, but not for the rest of either."""
    both = [prompt(104_300 + i, 200 * BLOCK_TOKENS) for i in range(2)]
    await bench.reference.tokens(both)
    for each in both:
        await bench.b.complete(each[: 140 * BLOCK_TOKENS], 1)
    answers = [
        asyncio.ensure_future(
            bench.right(bench.a.complete(each, kv_transfer_params=bench.b.peer), each)
        )
        for each in both
    ]
    async with bench.a.held_at(VALIDATE, asyncio.gather(*answers)) as both_right:
        await asyncio.sleep(0.3)
    await asyncio.wait_for(both_right, SETTLE_DEADLINE_S)


async def test_a_pull_is_not_stuck_behind_what_does_not_fit(bench):
    """The first request of the queue gets no answer to its lookup, and does not fit."""
    first, second = (prompt(104_400 + i, 200 * BLOCK_TOKENS) for i in range(2))
    await bench.reference.tokens([first, second])
    await bench.b.complete(second[: 140 * BLOCK_TOKENS], 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = named(silent.getsockname()[1])
        theirs = asyncio.ensure_future(
            bench.right(bench.a.complete(first, kv_transfer_params=peer), first)
        )
        await asyncio.sleep(0.5)
        pull = bench.a.complete(second, kv_transfer_params=bench.b.peer)
        async with bench.a.held_at(VALIDATE, bench.right(pull, second)) as ours:
            # The lookup has failed by then.
            await asyncio.sleep(3)
        await asyncio.wait_for(asyncio.gather(ours, theirs), SETTLE_DEADLINE_S)


async def test_blocks_still_being_computed_are_not_offered(bench):
    asked = prompt(105_000, 1000)
    computed = bench.a.complete(asked)
    async with bench.a.held_at(STEP, computed) as theirs, bench.pulled(0):
        await bench.right(bench.ask(asked), asked)
    await bench.right(theirs, asked)
    assert await bench.a.count("served_in_flight") == 1


async def test_control_without_in_flight_exclusion_tokens_are_wrong(bench):
    asked = prompt(106_000, 1000)
    bench.a.close_gate(OFFER_IN_FLIGHT)
    try:
        async with (
            bench.a.held_at(STEP, bench.a.complete(asked)) as theirs,
            bench.pulled(full_blocks(asked)),
        ):
            await bench.wrong(bench.ask(asked), asked)
    finally:
        bench.a.open_gate(OFFER_IN_FLIGHT)
    await theirs


@pytest.mark.parametrize("gate", MOMENTS)
async def test_blocks_evicted_meanwhile_are_computed(bench, gate):
    asked = prompt(107_000 + MOMENTS.index(gate), 1000)
    await bench.prepare(asked)
    rejected = await bench.b.count("blocks_rejected")
    async with bench.pulled(0):
        async with bench.b.held_at(gate, bench.ask(asked)) as answer:
            await evict_all(bench, seed=107_100)
        await bench.right(answer, asked)
    rejected = await bench.b.count("blocks_rejected") - rejected
    assert rejected == (0 if gate == LOOKUP else full_blocks(asked))


async def test_blocks_evicted_and_cached_again_meanwhile_are_computed(bench):
    asked = prompt(108_000, 1000)
    await bench.prepare(asked)
    async with bench.pulled(0):
        async with bench.b.held_at(VALIDATE, bench.ask(asked)) as answer:
            await evict_all(bench, seed=108_100)
            await bench.a.complete(asked, 1)
        await bench.right(answer, asked)


async def test_control_without_validation_tokens_are_wrong(bench):
    asked = prompt(109_000, 1000)
    await bench.prepare(asked)
    bench.b.close_gate(TRUST_ALL)
    try:
        async with bench.pulled(full_blocks(asked)):
            async with bench.b.held_at(READ, bench.ask(asked)) as answer:
                await evict_all(bench, seed=109_100)
            await bench.wrong(answer, asked)
    finally:
        bench.b.open_gate(TRUST_ALL)


IMPOSSIBLE_HOSTS = ["", "a..b", "a" * 100, "a" * 1000, "a\nERROR forged", "\0", 5]


class Everything:
    """A ledger that has every block, and calls every block valid."""

    def lookup(self, hashes: list[bytes]) -> Offer:
        return Offer(1, list(range(1, len(hashes) + 1)), "")

    def validate(self, token: int) -> int:
        return 1 << 40


async def test_a_peer_with_another_secret_is_nobody(bench):
    server = Server(Everything(), Peer({}, []), b"another secret, of 16+")
    try:
        asked = prompt(111_000, 500)
        async with bench.pulled(0):
            await bench.right(bench.ask(asked, named(server.port)), asked)
        # Pulls from another peer still work.
        await bench.well(111_001)
    finally:
        server.close()


async def test_a_peer_that_serves_another_model_is_refused(bench):
    asked = prompt(112_000, 500)
    await bench.foreign.complete(asked, 1)
    async with bench.pulled(0):
        await bench.right(bench.ask(asked, bench.foreign.peer), asked)
    assert "served_model_name is model here" in bench.b.log.read_text()


async def test_a_peer_that_is_not_there(bench):
    """Nothing listens, the listener does not answer, or the router sends nonsense."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        closed_port = reserve(1)[0].http
        peers = [
            named(closed_port),
            named(silent.getsockname()[1]),
            named(0),
            {"direct_read": {"host": None}},
            *({"direct_read": {"host": h, "port": 1}} for h in IMPOSSIBLE_HOSTS),
            {"direct_read": "127.0.0.1"},
            {"direct_read": None},
        ]
        async with bench.pulled(0):
            for number, peer in enumerate(peers):
                asked = prompt(113_000 + number, 500)
                await bench.right(bench.ask(asked, peer), asked)
    log = bench.b.log.read_text()
    assert "forged" not in log
    assert "cannot ask" not in log


async def test_a_peer_that_lies_about_its_memory(bench):
    """It holds the secret and has our fingerprint, but its addresses lead nowhere."""
    theirs = await asyncio.to_thread(hello, bench.a.peer)
    for worker in theirs.workers:
        worker.base_addresses = [16 for _ in worker.base_addresses]
    server = Server(Everything(), theirs, DIRECT_READ_SECRET.encode())
    try:
        asked = prompt(114_000, 500)
        async with bench.pulled(0):
            await bench.right(bench.ask(asked, named(server.port)), asked)
    finally:
        server.close()
    await bench.well(114_001)


def hello(peer: dict) -> Peer:
    client = Client(**peer["direct_read"], secret=DIRECT_READ_SECRET.encode())
    try:
        return client.hello()
    finally:
        client.close()


@pytest.mark.parametrize("gate", MOMENTS)
async def test_abort(bench, gate):
    asked = prompt(115_000 + MOMENTS.index(gate), 1000)
    await bench.prepare(asked)
    async with bench.b.held_at(gate, bench.ask(asked)) as answer:
        await aborted(answer)
        await bench.b.has(waiting=0)
        if gate != LOOKUP:
            # Blocks that may still be written must not be given to another request.
            await bench.b.complete([0], 2)
            held = (await bench.b.counters()).used_blocks
            assert held == full_blocks(asked)
    await bench.well(115_100 + 20 * MOMENTS.index(gate))


@pytest.mark.parametrize("gate", MOMENTS)
async def test_the_peer_is_stopped(bench, gate):
    """B computes what it cannot read, no later than its timeouts allow."""
    asked = prompt(116_000 + MOMENTS.index(gate), 1000)
    await bench.prepare(asked)
    began_s = time.monotonic()
    async with bench.pulled(0):
        async with bench.b.held_at(gate, bench.ask(asked)) as answer:
            stop = bench.a.stopped()
            stop.__enter__()
        try:
            await bench.right(answer, asked)
        finally:
            stop.__exit__(None, None, None)
        assert time.monotonic() - began_s < PROGRESS_TIMEOUT_S + 7
    # What A sent late must not have changed another request's blocks.
    await bench.right(bench.b.complete(asked), asked)
    await bench.well(116_100 + 20 * MOMENTS.index(gate))


async def test_the_peer_is_killed_while_b_reads(bench):
    asked = [prompt(117_000 + i, 1000) for i in range(2)]
    for each in asked:
        await bench.prepare(each)
    async with bench.pulled(0):
        async with bench.b.held_at(MID_READ, bench.ask(asked[0])) as answer:
            bench.a.kill()
        await bench.right(answer, asked[0])
        await bench.right(bench.ask(asked[1]), asked[1])
