# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for clients: the requests of a connection, one after the other.

A request is handled once it is here whole, and its handling is cancelled if the client
goes away. What a client can cost is bounded: the length of a head and of a body, the
time for both, and what is kept for it while it does not take its answers. What all
clients can cost together is bounded by a budget of bytes for their requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Literal, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from multidict import CIMultiDict, MultiMapping

from .http_client import MAX_HEAD_BYTES, encode_head

# How long a connection may be silent between requests.
KEEPALIVE_S = 75.0
# For a request to be here whole: this, and what its bytes take at this rate. Apache's
# mod_reqtimeout has these figures.
REQUEST_S = 20.0
MIN_BYTES_PER_S = 500
# For a client to read its error, before what it still sends is answered by a reset.
LINGER_S = 2.0
SWEEP_EVERY_S = 1.0
# Connections that nobody has looked at yet.
BACKLOG = 4096
# Requests, and their bytes, that a connection may send ahead of an answer before it is
# read no further.
MAX_AHEAD = 8
MAX_AHEAD_BYTES = 1 << 18
# Bytes that a request and a line of its head take, beside their own.
REQUEST_COST_BYTES = 2048
LINE_COST_BYTES = 200
# The same for all requests, and the seconds a client may take nothing, of a server
# that takes no bodies.
BODILESS_HELD_BYTES = 1 << 20
BODILESS_TIMEOUT_S = 10.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# RFC 3986, 3.2.2: a name, an IPv4 address or an IPv6 address in brackets; and a port.
_HOST = re.compile(r"([\w.~!$&'()*+,;=%-]*|\[[\da-fA-F:.]+\])(:\d*)?", re.ASCII)
_REASONS = {status.value: status.phrase for status in HTTPStatus}
log = logging.getLogger(__name__)


class ClientStalled(ConnectionResetError):
    """The client has stopped reading, and its connection has been ended."""


class Request:
    """A client's request, whole when it is handled, and the way for its answer.

    A HEAD request is handled as a GET. `refusal`: the status and the reason for which
    its body is left out. `held_bytes`: its part of the server's budget. `keep_alive`:
    another request may follow on the connection.
    """

    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    _version = "1.1"
    _chunked = False
    _head_only = False

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.target = b""
        self.refusal: tuple[int, str] | None = None
        self.held_bytes = 0
        self.keep_alive = False
        self.state: Literal["asked", "begun", "answered"] = "asked"
        self._pieces: list[bytes] = []
        self._unsent = b""

    def headed(self, parser: HttpRequestParser, lines: list[tuple[str, str]]) -> None:
        """Take the head. HTTP/1.0 has no chunks: the connection's end ends a stream.

        Raises HttpParserError if its target is no URL.
        """
        method, url = parser.get_method().decode(), parse_url(self.target)
        self._head_only = method == "HEAD"
        self.method = "GET" if self._head_only else method
        self.path, self.query = (url.path or b"/").decode(), (url.query or b"").decode()
        self.headers = CIMultiDict(lines)
        self._version = parser.get_http_version()
        self._chunked = self._version == "1.1"
        self.keep_alive = self._chunked and parser.should_keep_alive()

    def fault(self) -> tuple[int, str] | None:
        """Return the status and the reason for which its head cannot be served."""
        if self._version not in ("1.0", "1.1"):
            return 505, f"HTTP/{self._version} is not served: use HTTP/1.1"
        hosts = self.headers.getall("Host", ())
        # RFC 9112, 3.2: HTTP/1.0 may do without.
        if len(hosts) > 1 or (not hosts and self._version == "1.1"):
            return 400, "one Host header is needed"
        if hosts and not _HOST.fullmatch(hosts[0]):
            return 400, "the Host header names no host"
        for coding in self.headers.getall("Content-Encoding", ()):
            if coding.lower() != "identity":
                return 415, f"the body is compressed ({coding}): send it as it is"
        for coding in self.headers.getall("Transfer-Encoding", ()):
            if coding.lower() != "chunked":
                return 501, f"the transfer coding {coding} is not served: use chunked"
        return None

    def add(self, piece: bytes) -> None:
        """Take the next piece of the body."""
        self._pieces.append(piece)

    def leave_out(self, status: int, reason: str) -> None:
        """Drop the body, which is refused."""
        self._pieces.clear()
        self.refusal = status, reason

    def complete(self) -> None:
        """Join the pieces of the body."""
        pieces = self._pieces
        self.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        """Answer at once. A stream that has begun is broken off instead."""
        before, self.state = self.state, "answered"
        if before == "begun":
            self.keep_alive = False
        elif before == "asked":
            head = self._head(status, headers, f"Content-Length: {len(body)}")
            self.connection.send(head if self._head_only else head + body)

    @property
    def takes_interim(self) -> bool:
        """True if an interim answer may come before the answer."""
        return self.state == "asked" and self._version == "1.1"

    def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin a stream; its head goes out with the first chunk."""
        self.state = "begun"
        own = ("Transfer-Encoding: chunked",) if self._chunked else ()
        self._unsent = self._head(status, headers, *own)

    def write(self, chunk: bytes) -> None:
        """Send the stream's next chunk; nothing once it has ended."""
        if self.state == "begun":
            self._send(self._framed(chunk))

    def end(self, chunk: bytes = b"") -> None:
        """Send the stream's last chunk, which may be empty; once only."""
        if self.state == "answered":
            return
        self.state = "answered"
        self._send(self._framed(chunk) + (b"0\r\n\r\n" if self._chunked else b""))

    def _send(self, data: bytes) -> None:
        head, self._unsent = self._unsent, b""
        self.connection.send(head + data)

    def _head(self, status: int, headers: MultiMapping[str], *own: str) -> bytes:
        line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"
        if not self.keep_alive:
            own = (*own, "Connection: close")
        return encode_head(line, headers, *own)

    def _framed(self, chunk: bytes) -> bytes:
        if not (chunk and self._chunked):
            return chunk
        return b"%x\r\n%b\r\n" % (len(chunk), chunk)


Handle = Callable[[Request], Awaitable[None]]


class Server:
    """Calls `handle` with each request; bodies above `max_body_bytes` are left out.

    All requests together may hold `max_held_bytes` until they have been handled. Above,
    the largest that is still being read is refused: a small one finds room. A client
    that takes nothing of its answers for `client_timeout_s` is cut.
    """

    def __init__(
        self,
        handle: Handle,
        max_body_bytes: int,
        max_held_bytes: int,
        client_timeout_s: float,
    ) -> None:
        self.handle = handle
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = max_held_bytes
        self.held_bytes = 0
        self.client_timeout_s = client_timeout_s
        self.connections: set[_Connection] = set()
        self.draining = False

    async def listen(
        self, host: str, port: int, bound: socket.socket | None = None
    ) -> asyncio.Server:
        """Listen at the address, or by `bound`, which other processes may share.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        where = {"host": host, "port": port} if bound is None else {"sock": bound}
        try:
            return await loop.create_server(
                lambda: _Connection(self), **where, backlog=BACKLOG
            )
        except socket.gaierror as error:
            raise OSError(error.errno, error.strerror, host) from None

    def hold(self, request: Request, count: int) -> None:
        """Take `count` bytes for the request out of the budget."""
        request.held_bytes += count
        self.held_bytes += count

    def release(self, request: Request) -> None:
        """Give the request's bytes back."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def shed(self) -> None:
        """Refuse the largest bodies that are being read, until the budget holds."""
        while self.held_bytes > self.max_held_bytes:
            largest = max(self.connections, key=lambda one: one.body_held_bytes)
            if not largest.body_held_bytes:
                return
            largest.leave_out(503, "the proxy is full of requests; try again later")

    async def sweep_forever(self) -> None:
        """End connections that take too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for connection in list(self.connections):
                connection.sweep(loop.time())

    async def drain(self, limit_s: float, hurried: asyncio.Event) -> None:
        """Answer the requests under way, and no others.

        Returns after `limit_s`, or once `hurried` is set, even if some are left.
        """
        self.draining = True
        for connection in list(self.connections):
            connection.drain()
        deadline = asyncio.get_running_loop().time() + limit_s
        while asyncio.get_running_loop().time() < deadline and not hurried.is_set():
            if not any(connection.busy for connection in self.connections):
                return
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all connections; answers that are soon complete are sent first."""
        for connection in list(self.connections):
            connection.stop()
        deadline = asyncio.get_running_loop().time() + LINGER_S
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.cut()


@asynccontextmanager
async def answering(
    handle: Handle, host: str, port: int, bound: socket.socket | None = None
) -> AsyncIterator[int]:
    """Handle requests without bodies inside the context, which gives the port.

    Raises OSError.
    """
    server = Server(handle, 0, BODILESS_HELD_BYTES, BODILESS_TIMEOUT_S)
    listening = await server.listen(host, port, bound)
    sweeping = asyncio.create_task(server.sweep_forever())
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        sweeping.cancel()
        listening.close()
        await server.close()


class _Connection(asyncio.Protocol):
    """A client's connection: reads a request, handles another, queues those between.

    `held_up`: whether the client takes less than it is sent.
    `_half_closed`: the client sends no more, but may still read.
    `_since` is when the request that is read began, or when the connection became idle
    or began to end. `_headlike_bytes` came since the request began, or since the last
    of its body: of a head, trailers, or what chunks may have beside their length.
    """

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._reading: Request | None = None
        self._lines: list[tuple[str, str]] = []
        self._in_head = False
        self._headlike_bytes = self._head_bytes = 0
        self._body_bytes = self._unparsed_bytes = 0
        self._ahead: deque[Request] = deque()
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = self._paused = False
        self._half_closed = self._looked_for = False
        self._since = self._loop.time()
        self._waiter: asyncio.Future[None] | None = None
        self.held_up = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._ending = True
        for request in (*self._ahead, *filter(None, [self._reading])):
            self._server.release(request)
        self._wake()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Return whether to keep the way back open: if an answer is under way.

        A client that is gone looks the same for now.
        """
        self._half_closed = self._ending = True
        return self._current is not None

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if self._unparsed_bytes:
            self._add_unparsed(data)
            return
        self._headlike_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._add_unparsed(data[upgrade.args[0] :])
        except HttpParserError as error:
            self._refuse(400, f"this is no HTTP request: {error}")
        if self._reading is not None and self._headlike_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        """Read on, unless the client has sent far ahead of the answer under way."""
        far = self._current is not None and self._is_far_ahead()
        if far == self._paused or self._transport.is_closing():
            return
        self._paused = far
        if far:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _is_far_ahead(self) -> bool:
        ahead = [*self._ahead, *filter(None, [self._reading])]
        held_bytes = sum(request.held_bytes for request in ahead)
        return len(self._ahead) >= MAX_AHEAD or held_bytes > MAX_AHEAD_BYTES

    @property
    def body_held_bytes(self) -> int:
        """Bytes of the request whose body is being read, 0 without one."""
        reading = None if self._in_head else self._reading
        return 0 if reading is None else reading.held_bytes

    def on_message_begin(self) -> None:
        if self._ending:
            return
        self._reading = Request(self)
        self._server.hold(self._reading, REQUEST_COST_BYTES)
        self._in_head = True
        self._headlike_bytes = self._head_bytes = self._body_bytes = 0
        self._since = self._loop.time()

    def on_url(self, piece: bytes) -> None:
        if self._reading is not None:
            self._reading.target += piece
            self._head_bytes += len(piece)
            self._server.hold(self._reading, len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and self._reading is not None:  # and not in a trailer
            line_bytes = len(name) + len(value)
            self._head_bytes += line_bytes
            self._server.hold(self._reading, LINE_COST_BYTES + line_bytes)
            self._lines.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        request, self._in_head = self._reading, False
        if request is None:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_long_head()
            return
        request.headed(self._parser, self._lines)
        self._lines.clear()
        waits = request.headers.get("Expect", "").lower() == "100-continue"
        self._server.shed()
        if request.refusal is not None:
            return
        if _length(request) > self._server.max_body_bytes:
            self._leave_out_long()
        elif waits and request.takes_interim and self._current is None:
            # Not into the middle of an answer.
            self._transport.write(CONTINUE)

    def on_body(self, piece: bytes) -> None:
        if self._reading is None:
            return
        self._reading.add(piece)
        self._headlike_bytes = 0
        self._body_bytes += len(piece)
        self._server.hold(self._reading, len(piece))
        if self._body_bytes > self._server.max_body_bytes:
            self._leave_out_long()
        else:
            self._server.shed()

    def on_message_complete(self) -> None:
        if self._reading is None:
            return
        if self._parser.should_upgrade():
            # To a protocol that nobody speaks here. The body comes as if not asked for.
            self._unparsed_bytes = _length(self._reading)
            return
        request, self._reading = self._reading, None
        self._take(request)

    def _add_unparsed(self, data: bytes) -> None:
        """Take the body after a request for an upgrade, which llhttp leaves out."""
        request = self._reading
        if request is None:
            return
        piece = data[: self._unparsed_bytes]
        request.add(piece)
        self._server.hold(request, len(piece))
        self._body_bytes += len(piece)
        self._unparsed_bytes -= len(piece)
        if self._unparsed_bytes == 0:
            self._reading, request.keep_alive, self._ending = None, False, True
            self._take(request)

    def _leave_out_long(self) -> None:
        limit = self._server.max_body_bytes
        self.leave_out(413, f"the body is too large: at most {limit} bytes")

    def leave_out(self, status: int, reason: str) -> None:
        """Handle the request that is read without its body, and nothing after it."""
        request, self._reading = self._reading, None
        assert request is not None
        request.leave_out(status, reason)
        self._server.release(request)
        request.keep_alive, self._ending = False, True
        self._take(request)

    def _take(self, request: Request) -> None:
        """Handle the request, or queue it until those before it have been answered."""
        request.complete()
        if self._current is None:
            self._handle(request)
            return
        self._ahead.append(request)

    def _handle(self, request: Request) -> None:
        self._current = request
        if self._server.draining and not self._ahead:
            request.keep_alive = False
        self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        """Answer the request; return also if the client is gone."""
        try:
            await self._server.handle(request)
            await self.taken()
        except ConnectionResetError:
            pass
        except Exception:
            log.exception("%s %s", request.method, request.path)
        finally:
            self._handled(request)

    def _handled(self, request: Request) -> None:
        self._server.release(request)
        self._current = self._task = None
        if self._transport.is_closing():
            return
        if request.state != "answered":
            self.cut()
        elif self._ahead and request.keep_alive:
            self._handle(self._ahead.popleft())
            self._read_or_pause()
        elif self._ending or not request.keep_alive or self._server.draining:
            self.finish()
        else:
            self._since = self._loop.time()
            self._read_or_pause()

    def _refuse_long_head(self) -> None:
        self._refuse(431, f"the head is longer than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, what: str) -> None:
        """Answer invalid bytes, unless a request is being answered, and end."""
        if self._reading is not None:
            self._server.release(self._reading)
            self._reading = None
        if self._current is None and not self._ending:
            text = CIMultiDict({"Content-Type": "text/plain"})
            Request(self).whole(status, text, what.encode())
            self.finish()
        self._ending = True

    def send(self, data: bytes) -> None:
        """Send to the client. Raises ConnectionResetError if it is gone."""
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._transport.write(data)

    def pause_writing(self) -> None:
        self.held_up = True

    def resume_writing(self) -> None:
        self.held_up = False
        self._wake()

    async def taken(self) -> None:
        """Wait until the client takes more, or is gone. Raises ClientStalled."""
        while self.held_up and not self._transport.is_closing():
            unsent_bytes = self._unsent_bytes
            self._waiter = self._loop.create_future()
            try:
                async with asyncio.timeout(self._server.client_timeout_s):
                    await self._waiter
            except TimeoutError:
                if self._unsent_bytes == unsent_bytes:
                    self.cut()
                    seconds = f"{self._server.client_timeout_s:g} s"
                    what = f"the client took nothing for {seconds}"
                    raise ClientStalled(what) from None

    @property
    def _unsent_bytes(self) -> int:
        transport = self._transport
        return 0 if transport.is_closing() else transport.get_write_buffer_size()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cut(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    @property
    def busy(self) -> bool:
        """True while a request is read or answered."""
        return self._current is not None or self._reading is not None

    def drain(self) -> None:
        """End unless a request is read or answered; if so, end after its answer."""
        if not self.busy:
            self.stop()

    def stop(self) -> None:
        """Take no further request, and end when the current one is answered."""
        self._ending = True
        if self._current is not None:
            return
        if self._reading is None and not self._unsent_bytes:
            self.cut()  # a client's idle connections may not even be looked at
        else:
            self.finish()

    def finish(self) -> None:
        """End the connection when all that was written has been sent."""
        self._ending = True
        self._since = self._loop.time()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def sweep(self, now: float) -> None:
        """End the connection if it takes too long, unless a request is handled."""
        waited_s = now - self._since
        if self._current is not None:
            if self._half_closed:
                self._look_for_client(self._current)
            return
        if self._ending or self._transport.is_closing():
            unsent = self._unsent_bytes > 0
            if waited_s > (self._server.client_timeout_s if unsent else LINGER_S):
                self.cut()
        elif self._reading is None:
            if waited_s > KEEPALIVE_S:
                self.finish()
        elif waited_s > REQUEST_S + self._body_bytes / MIN_BYTES_PER_S:
            self._refuse(408, f"the request is not here whole after {waited_s:.0f} s")

    def _look_for_client(self, request: Request) -> None:
        """End the connection if the client has ended more than its own side.

        Then what it is sent comes back as a reset: chunks of a stream, else an interim
        answer, which any client passes over.
        """
        own_socket = self._transport.get_extra_info("socket")
        if own_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.cut()
        elif request.takes_interim and not self._looked_for:
            self._looked_for = True
            self.send(CONTINUE)


def _length(request: Request) -> int:
    """Return the announced length of the body."""
    return int(request.headers.get("Content-Length", 0))
