# SPDX-License-Identifier: Apache-2.0
"""A is not what B takes it for, or stops, or is killed: B still answers right.

The last test kills A, so this module is the last that uses it.
"""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from connectors.direct_read.bench.gated_servers import PROGRESS_TIMEOUT_S, named
from connectors.direct_read.bench.gates import LOOKUP, MID_READ
from connectors.direct_read.client import Client
from connectors.direct_read.protocol import Offer, Peer
from connectors.direct_read.server import Server
from kvtax.engine.environment import DIRECT_READ_SECRET
from kvtax.proc.ports import reserve
from tests.harness.tiny.checkpoint import prompt
from tests.harness.tiny.server import aborted

from .bench import MOMENTS, full_blocks

pytestmark = pytest.mark.long

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
    for one in asked:
        await bench.prepare(one)
    async with bench.pulled(0):
        async with bench.b.held_at(MID_READ, bench.ask(asked[0])) as answer:
            bench.a.kill()
        await bench.right(answer, asked[0])
        await bench.right(bench.ask(asked[1]), asked[1])
