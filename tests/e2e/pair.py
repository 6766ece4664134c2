# SPDX-License-Identifier: Apache-2.0
"""Pairs of a prefill (P) and a decode (D) instance: their router, for each connector.

For Mooncake's also the moments at which to make a transfer go wrong.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.harness.tiny.checkpoint import prompt
from tests.harness.tiny.server import Answer, TinyServer, Tokens, aborted
from tests.harness.tiny.servers import Reference


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
