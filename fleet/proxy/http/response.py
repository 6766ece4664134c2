# SPDX-License-Identifier: Apache-2.0
"""A server's answer: its head, and its body as it comes."""

from __future__ import annotations

import asyncio
from typing import Protocol

from multidict import CIMultiDict

# Of an answer that nobody takes, before its connection is read no further.
MAX_AHEAD_BYTES = 1 << 18


class BrokenOff(ConnectionError):
    """The server has ended the connection, or said what is no HTTP."""


class Connection(Protocol):
    """What an answer needs of the connection that it comes by."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class Response:
    """An answer whose head is here; its body comes by `chunk`."""

    status = 0
    headers: CIMultiDict[str]

    def __init__(self, connection: Connection, silence_timeout_s: float) -> None:
        self._connection = connection
        self._silence_timeout_s = silence_timeout_s
        self._pieces: list[bytes] = []
        self._ahead_bytes = 0
        self._complete = False
        self._error: BrokenOff | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._silent_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def at_end(self) -> bool:
        """Whether it is known that nothing more comes."""
        return self._complete and not self._pieces

    async def begun(self) -> None:
        """Returns when the head is here. Raises as `chunk`."""
        while not self.status:
            await self._news()

    async def chunk(self) -> bytes:
        """All that has come, at least a byte; b"" at the end.

        Raises TimeoutError if nothing comes for too long, and BrokenOff.
        """
        while not self._pieces:
            if self._complete:
                return b""
            await self._news()
        pieces = self._pieces
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._ahead_bytes > MAX_AHEAD_BYTES and not self._complete:
            self._connection.resume_reading()
        self._ahead_bytes = 0
        return whole

    async def read(self) -> bytes:
        """All of the rest. Raises as `chunk`."""
        pieces = []
        while piece := await self.chunk():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """End the connection if there is more to come."""
        if not self._complete:
            self._connection.abort()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        before, self._ahead_bytes = self._ahead_bytes, self._ahead_bytes + len(piece)
        if before <= MAX_AHEAD_BYTES < self._ahead_bytes:
            self._connection.pause_reading()

    def finish(self, error: BrokenOff | None = None) -> None:
        """All of it is here, unless there is an error."""
        self._complete, self._error = error is None, error
        if self._timer is not None:
            self._timer.cancel()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Returns when something has come."""
        if self._error is not None:
            raise self._error
        self._silent_at_s = self._loop.time() + self._silence_timeout_s
        if self._timer is None:
            self._watch()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _watch(self) -> None:
        """One timer for all waits of an answer: it looks when the last one began."""
        left_s = self._silent_at_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
            return
        self._timer = None  # the next wait begins anew
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError("nothing came in time"))
