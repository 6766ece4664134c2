# SPDX-License-Identifier: Apache-2.0
"""What the workers of one proxy ask each other, so that any of them can speak for all.

Each answers the others at a port of its own on the loopback interface, which stands in
the shared memory. What a worker has counted goes with it when it dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from multidict import CIMultiDict

from .counts import Counts
from .http.client import Pool
from .http.request import Request
from .http.server import Server
from .shared import Seat

TIMEOUT_S = 1.0
_LOOPBACK = "127.0.0.1"
_MAX_BODY_BYTES = 0
log = logging.getLogger(__name__)


class Peers:
    """The others; there are none without a `seat`."""

    def __init__(self, seat: Seat | None, pool: Pool) -> None:
        self._seat = seat
        self._pool = pool

    @asynccontextmanager
    async def answered(
        self, answer: Callable[[Request], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """They are answered inside the context. Raises OSError."""
        if self._seat is None:
            yield
            return
        server = Server(answer, _MAX_BODY_BYTES, TIMEOUT_S)
        listening = await server.listen(_LOOPBACK, 0)
        ports, place = self._seat.shared.ports, self._seat.place
        ports[place] = listening.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            ports[place] = 0
            listening.close()
            await server.close()

    async def counts(self) -> list[Counts]:
        """What each has counted."""
        return [
            msgspec.json.decode(answer, type=Counts)
            for answer in await self._ask("/counts")
        ]

    async def decisions(self) -> list[bytes]:
        """The lines of their last decisions."""
        return [
            line
            for answer in await self._ask("/decisions")
            for line in answer.splitlines()
        ]

    async def _ask(self, path: str) -> list[bytes]:
        """The answers of those that give one."""
        if self._seat is None:
            return []
        ports = self._seat.shared.ports.tolist()
        ports[self._seat.place] = 0
        urls = [f"http://{_LOOPBACK}:{port}" for port in ports if port]
        answers = await asyncio.gather(*(self._one(url, path) for url in urls))
        return [answer for answer in answers if answer is not None]

    async def _one(self, url: str, path: str) -> bytes | None:
        """None from one that is ending, or too busy."""
        nothing: CIMultiDict[str] = CIMultiDict()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._pool.request("GET", url, path, nothing)
                try:
                    return await answer.read()
                finally:
                    answer.close()
        except OSError as error:  # a TimeoutError is one
            log.warning("the worker at %s: %r", url, error)
            return None
