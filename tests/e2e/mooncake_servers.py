# SPDX-License-Identifier: Apache-2.0
"""Mooncake instances to make transfers go wrong with, and the moments to do it at."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lab.tiny.checkpoint import prompt
from lab.tiny.server import Answer, TinyServer, Tokens, aborted
from lab.tiny.servers import Reference

from .pair import pull_params, route, send_params


@dataclass(frozen=True)
class Bench:
    """`d` recomputes what it cannot pull; `foreign` has other weights."""

    p: TinyServer
    d: TinyServer
    unfixed: TinyServer
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
    waiting = (await d.counters()).waiting
    pull = await pulling(p, d, asked, transfer_id)
    await d.has(waiting=waiting + 1)
    # Steps of D wait for its event loop, so by then it has asked P.
    await d.complete([0], 2)
    with d.stopped():
        await p.complete(asked, 1, send_params(transfer_id))
        await d.has_unread(2**15)
        yield pull
