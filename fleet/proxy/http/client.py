# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to servers: connections are kept for a while, and a request takes one."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from functools import cache
from typing import NamedTuple
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict, MultiMapping

from .heads import MAX_HEAD_BYTES, written

# Of an answer that nobody takes, before its connection is read no further.
MAX_AHEAD_BYTES = 1 << 18
# Up to this, head and body go out as one piece.
_SMALL_BYTES = 1 << 14
# Statuses whose answers have no body.
_BODILESS = (204, 304)


class NoConnection(OSError):
    """There is none, and nothing has been sent; `__cause__` says why."""


class BrokenOff(ConnectionError):
    """The server has ended the connection, or said what is no HTTP."""


class Place(NamedTuple):
    """Where a server is. `path` comes before that of each request."""

    host: str
    port: int
    tls: bool
    path: str
    authority: str


@cache
def place_of(url: str) -> Place:
    """Raises ValueError."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    authority = parts.netloc.rpartition("@")[2]
    return Place(parts.hostname or "", port, tls, parts.path.rstrip("/"), authority)


class Pool:
    """Connections to any servers. One that is not used for `keep_s` is not used again.

    `silence_timeout_s`: how long a server may send nothing.
    """

    def __init__(
        self, connect_timeout_s: float, silence_timeout_s: float, keep_s: float
    ) -> None:
        self.silence_timeout_s = silence_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._keep_s = keep_s
        self._loop = asyncio.get_running_loop()
        # By place; the one that was used last is the last one.
        self._idle: dict[Place, dict[_Connection, None]] = defaultdict(dict)
        self._tls: ssl.SSLContext | None = None

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        headers: MultiMapping[str],
        body: bytes = b"",
    ) -> Response:
        """The answer, once its head is here.

        Raises NoConnection, BrokenOff, or TimeoutError if the server is silent.
        """
        place = place_of(url)
        connection = self._taken(place) or await self._connected(place)
        own = [f"Host: {place.authority}"]
        if body or method == "POST":
            own.append(f"Content-Length: {len(body)}")
        head = written(f"{method} {place.path}{path} HTTP/1.1", headers, *own)
        response = connection.ask(head, body)
        try:
            await response.begun()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in list(connections):
                connection.abort()

    def keep(self, connection: _Connection) -> None:
        """For the next request, if there is one soon."""
        if self._keep_s <= 0 or not connection.reusable:
            connection.abort()
            return
        connection.resume_reading()
        connections = self._idle[connection.place]
        connections[connection] = None
        connection.idle_since = self._loop.time()
        oldest = next(iter(connections))
        if not self._fresh(oldest):
            oldest.abort()

    def forget(self, connection: _Connection) -> None:
        self._idle[connection.place].pop(connection, None)

    def _taken(self, place: Place) -> _Connection | None:
        connections = self._idle[place]
        while connections:
            connection, _ = connections.popitem()
            if self._fresh(connection):
                return connection
            connection.abort()
        return None

    def _fresh(self, connection: _Connection) -> bool:
        used_s = self._loop.time() - connection.idle_since
        return connection.reusable and used_s < self._keep_s

    async def _connected(self, place: Place) -> _Connection:
        if place.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self, place),
                    place.host,
                    place.port,
                    ssl=self._tls if place.tls else None,
                )
        except TimeoutError as error:
            seconds = f"none within {self._connect_timeout_s:g} s"
            raise NoConnection(seconds) from error
        except OSError as error:
            raise NoConnection(*error.args) from error
        return connection


class Response:
    """An answer whose head is here; its body comes by `chunk`."""

    status = 0
    headers: CIMultiDict[str]

    def __init__(self, connection: _Connection, silence_timeout_s: float) -> None:
        self._connection = connection
        self._silence_timeout_s = silence_timeout_s
        self._pieces: list[bytes] = []
        self._ahead_bytes = 0
        self._complete = False
        self._error: BrokenOff | None = None
        self._waiter: asyncio.Future[None] | None = None

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
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Returns when something has come."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(self._silence_timeout_s, _time_out, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


class _Connection(asyncio.Protocol):
    """A connection to one server, with one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, pool: Pool, place: Place) -> None:
        self.place = place
        self.idle_since = 0.0
        self._pool = pool
        self._parser = HttpResponseParser(self)
        self._response: Response | None = None
        self._lines: list[tuple[str, str]] = []
        self._head_bytes = 0
        self._to_the_end = False

    def ask(self, head: bytes, body: bytes) -> Response:
        self._response = response = Response(self, self._pool.silence_timeout_s)
        self._head_bytes = 0
        if len(body) < _SMALL_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        return response

    @property
    def reusable(self) -> bool:
        """Whether it is open, and all of the last request has been sent."""
        transport = self._transport
        return not (transport.is_closing() or transport.get_write_buffer_size())

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        response, self._response = self._response, None
        if response is None:
            return
        if self._to_the_end and error is None:
            response.finish()
        else:
            response.finish(BrokenOff(str(error or "the connection was closed")))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.abort()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._break_off(f"what it says is no HTTP answer: {error}")
            return
        if not response.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break_off(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        response.wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._response.status:  # and not in a trailer
            self._lines.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        headers, status = CIMultiDict(self._lines), self._parser.get_status_code()
        self._lines.clear()
        if status < 200:
            return  # the answer comes after it
        chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        framed = chunked or "Content-Length" in headers or status in _BODILESS
        self._to_the_end = not framed
        self._response.headers, self._response.status = headers, status

    def on_body(self, piece: bytes) -> None:
        self._response.add(piece)

    def on_message_complete(self) -> None:
        response = self._response
        if not response.status:
            return
        self._response = None
        response.finish()
        if self._parser.should_keep_alive():
            self._pool.keep(self)
        else:
            self.abort()

    def _break_off(self, what: str) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.finish(BrokenOff(what))
        self.abort()


def _time_out(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError("nothing came in time"))
