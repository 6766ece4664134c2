# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to servers, by a pool of connections that stay open for a while.

httptools (llhttp, in C) parses. Bytes of a head are characters of Latin-1, so that
heads are passed on unchanged.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Coroutine
from functools import cache
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict, MultiMapping

# Bytes of a head. llhttp sets no limit; aiohttp and uvicorn take as much or less.
MAX_HEAD_BYTES = 1 << 16
# Bytes up to which head and body go out as one piece.
_SMALL_BYTES = 1 << 14
# Bytes of an answer waiting to be taken, at which its connection is read no further.
MAX_AHEAD_BYTES = 1 << 18
# Statuses of answers without a body.
_BODILESS = (204, 304)


class NoConnection(OSError):
    """No connection, so that nothing has been sent; `__cause__` says why."""


def encode_head(first_line: str, headers: MultiMapping[str], *own: str) -> bytes:
    """Encode a head to the blank line after it; `own` are lines beside the headers."""
    lines = [first_line, *[f"{name}: {value}" for name, value in headers.items()]]
    lines += [*own, "\r\n"]
    return "\r\n".join(lines).encode("latin-1", "replace")


class BrokenOff(ConnectionError):
    """The server ended the connection, or sent something else than HTTP."""


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
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._silent_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def at_end(self) -> bool:
        """True if nothing more comes."""
        return self._complete and not self._pieces

    async def begun(self) -> None:
        """Wait for the head. Raises as `chunk`."""
        while not self.status:
            await self._news()

    async def chunk(self) -> bytes:
        """Return all that has come, at least a byte; b"" at the end.

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
        """Return all of the rest. Raises as `chunk`."""
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
        """Note the end of the answer, or the error that ended it."""
        self._complete, self._error = error is None, error
        if self._timer is not None:
            self._timer.cancel()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        """Wait until something has come."""
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
        """Time out a wait: one timer serves all waits of an answer."""
        left_s = self._silent_at_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
            return
        self._timer = None  # the next wait begins anew
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError("nothing came in time"))


class Place(NamedTuple):
    """A server's address; `path` comes before the path of each request.

    `socket`: the Unix socket's file; empty for TCP.
    """

    host: str
    port: int
    tls: bool
    path: str
    authority: str
    socket: str = ""


@cache
def place_of(url: str) -> Place:
    """Parse an http:// or https:// URL, or unix:///FILE. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Place("", 0, False, "", "localhost", parts.path)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    authority = parts.netloc.rpartition("@")[2]
    return Place(parts.hostname or "", port, tls, parts.path.rstrip("/"), authority)


class Pool:
    """Connections to any servers; after `keep_s` idle seconds one is not used again.

    `silence_timeout_s`: seconds a server may send nothing. `tls`: for https, None to
    trust the system's certificates.
    """

    def __init__(
        self,
        connect_timeout_s: float,
        silence_timeout_s: float,
        keep_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.silence_timeout_s = silence_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._keep_s = keep_s
        self._loop = asyncio.get_running_loop()
        # By place, in order of their last use.
        self._idle: dict[Place, dict[_Connection, None]] = defaultdict(dict)
        self._tls = tls

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        headers: MultiMapping[str],
        body: bytes = b"",
    ) -> Response:
        """Send a request and return its answer, once its head is here.

        Raises NoConnection, BrokenOff, or TimeoutError if the server is silent.
        """
        place = place_of(url)
        connection = self._take_idle(place) or await self._connect(place)
        own = [f"Host: {place.authority}"]
        if body or method == "POST":
            own.append(f"Content-Length: {len(body)}")
        head = encode_head(f"{method} {place.path}{path} HTTP/1.1", headers, *own)
        response = connection.send(head, body)
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
        """Hold an idle connection for the next request."""
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

    def _take_idle(self, place: Place) -> _Connection | None:
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

    async def _connect(self, place: Place) -> _Connection:
        if place.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop, tls = self._loop, self._tls if place.tls else None

        def protocol() -> _Connection:
            return _Connection(self, place)

        connecting: Coroutine[Any, Any, tuple[asyncio.BaseTransport, _Connection]]
        if place.socket:
            connecting = loop.create_unix_connection(protocol, place.socket)
        else:
            connecting = loop.create_connection(
                protocol, place.host, place.port, ssl=tls
            )
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await connecting
        except TimeoutError as error:
            seconds = f"none within {self._connect_timeout_s:g} s"
            raise NoConnection(seconds) from error
        except OSError as error:
            raise NoConnection(*error.args) from error
        return connection


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

    def send(self, head: bytes, body: bytes) -> Response:
        self._response = response = Response(self, self._pool.silence_timeout_s)
        self._head_bytes = 0
        if len(body) < _SMALL_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        return response

    @property
    def reusable(self) -> bool:
        """True if the connection is open, and the last request has been sent whole."""
        transport = self._transport
        return not (transport.is_closing() or transport.get_write_buffer_size())

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

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
            self.abort()  # no request has been sent
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._break_off(f"it sent no HTTP answer: {error}")
            return
        if not response.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break_off(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        response.wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        if response and not response.status:  # and not in a trailer
            self._lines.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        headers, status = CIMultiDict(self._lines), self._parser.get_status_code()
        self._lines.clear()
        if status < 200:
            return  # the answer comes after it
        response = self._response
        assert response is not None
        chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        framed = chunked or "Content-Length" in headers or status in _BODILESS
        self._to_the_end = not framed
        response.headers, response.status = headers, status

    def on_body(self, piece: bytes) -> None:
        if self._response is not None:
            self._response.add(piece)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
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
