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
from .response import BrokenOff, Response

# Up to this, head and body go out as one piece.
_SMALL_BYTES = 1 << 14
# Statuses whose answers have no body.
_BODILESS = (204, 304)


class NoConnection(OSError):
    """There is none, and nothing has been sent; `__cause__` says why."""


class Place(NamedTuple):
    """Where a server is. `path` comes before that of each request.

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
    """Of an http:// or https:// URL, or unix:///FILE. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Place("", 0, False, "", "localhost", parts.path)
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
        loop, tls = self._loop, self._tls if place.tls else None

        def made() -> _Connection:
            return _Connection(self, place)

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await (
                    loop.create_unix_connection(made, place.socket)
                    if place.socket
                    else loop.create_connection(made, place.host, place.port, ssl=tls)
                )
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
