# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 for clients: the requests of a connection, one after the other.

A request is handled once it is here whole, and its handling is cancelled if the client
goes away. What a client can cost is bounded: the length of a head and of a body, the
time for both, and what is kept for it while it does not take its answers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from .heads import MAX_HEAD_BYTES
from .request import ClientStalled, Request

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
# Requests that a connection may send ahead before it is read no further.
MAX_AHEAD = 8
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
log = logging.getLogger(__name__)
Handle = Callable[[Request], Awaitable[None]]


class Server:
    """Calls `handle` with each request; bodies above `max_body_bytes` are left out.

    A client that takes nothing of its answers for `client_timeout_s` is cut.
    """

    def __init__(
        self, handle: Handle, max_body_bytes: int, client_timeout_s: float
    ) -> None:
        self.handle = handle
        self.max_body_bytes = max_body_bytes
        self.client_timeout_s = client_timeout_s
        self.connections: set[_Connection] = set()

    async def listen(
        self, host: str, port: int, bound: socket.socket | None = None
    ) -> asyncio.Server:
        """There, or where `bound` is, which may be shared with others.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        where = {"host": host, "port": port} if bound is None else {"sock": bound}
        return await loop.create_server(
            lambda: _Connection(self), **where, backlog=BACKLOG
        )

    async def sweep_forever(self) -> None:
        """End what takes too long, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for connection in list(self.connections):
                connection.sweep(loop.time())

    async def close(self) -> None:
        """End all connections; answers that are soon complete are sent first."""
        for connection in list(self.connections):
            connection.stop()
        deadline = asyncio.get_running_loop().time() + LINGER_S
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.cut()


class _Connection(asyncio.Protocol):
    """A client's connection: reads one request, handles one, keeps those in between.

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
        self._headlike_bytes = self._body_bytes = self._unparsed_bytes = 0
        self._ahead: deque[Request] = deque()
        self._current: Request | None = None
        self._task: asyncio.Task | None = None
        self._ending = False
        self._since = self._loop.time()
        self._waiter: asyncio.Future[None] | None = None
        self.held_up = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._ending = True
        self._wake()
        if self._task is not None:
            self._task.cancel()

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
            self._refuse(431, f"the head is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._reading = Request(self)
        self._in_head, self._headlike_bytes, self._body_bytes = True, 0, 0
        self._since = self._loop.time()

    def on_url(self, piece: bytes) -> None:
        self._reading.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and not in a trailer
            self._lines.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        request, self._in_head = self._reading, False
        request.headed(self._parser, self._lines)
        self._lines.clear()
        waits = request.headers.get("Expect", "").lower() == "100-continue"
        if _length(request) > self._server.max_body_bytes:
            self._leave_out()
        elif waits and self._current is None:  # not into the middle of an answer
            self._transport.write(CONTINUE)

    def on_body(self, piece: bytes) -> None:
        if self._reading is None:
            return
        self._reading.add(piece)
        self._headlike_bytes = 0
        self._body_bytes += len(piece)
        if self._body_bytes > self._server.max_body_bytes:
            self._leave_out()

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
        """After a request for an upgrade comes its body, which llhttp leaves out."""
        request = self._reading
        if request is None:
            return
        piece = data[: self._unparsed_bytes]
        request.add(piece)
        self._body_bytes += len(piece)
        self._unparsed_bytes -= len(piece)
        if self._unparsed_bytes == 0:
            self._reading, request.keep_alive, self._ending = None, False, True
            self._take(request)

    def _leave_out(self) -> None:
        """Handle the request without the rest of its body, and nothing after it."""
        request, self._reading = self._reading, None
        request.over_bytes = self._server.max_body_bytes
        request.keep_alive, self._ending = False, True
        self._take(request)

    def _take(self, request: Request) -> None:
        """Handle it, or keep it until those before it have been answered."""
        request.complete()
        if self._current is None:
            self._handle(request)
            return
        self._ahead.append(request)
        if len(self._ahead) == MAX_AHEAD:
            self._transport.pause_reading()

    def _handle(self, request: Request) -> None:
        self._current = request
        self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        """Also returns if the client is gone; the connection says so."""
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
        self._current = self._task = None
        if self._transport.is_closing():
            return
        if request.state != "answered":
            self.cut()
        elif self._ahead and request.keep_alive:
            if len(self._ahead) == MAX_AHEAD:
                self._transport.resume_reading()
            self._handle(self._ahead.popleft())
        elif self._ending or not request.keep_alive:
            self.finish()
        else:
            self._since = self._loop.time()

    def _refuse(self, status: int, what: str) -> None:
        """Answer what is no request, if nothing is being answered, and end."""
        if self._current is None and not self._ending:
            text = CIMultiDict({"Content-Type": "text/plain"})
            Request(self).whole(status, text, what.encode())
            self.finish()
        self._ending = True

    def send(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._transport.write(data)

    def pause_writing(self) -> None:
        self.held_up = True

    def resume_writing(self) -> None:
        self.held_up = False
        self._wake()

    async def taken(self) -> None:
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
        """End it at once."""
        self._transport.abort()

    def stop(self) -> None:
        """Take no further request, and end it when this one is answered."""
        self._ending = True
        if self._current is not None:
            return
        if self._reading is None and not self._unsent_bytes:
            self.cut()  # a client's idle connections may not even be looked at
        else:
            self.finish()

    def finish(self) -> None:
        """End it when all is sent that has been written."""
        self._ending = True
        self._since = self._loop.time()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def sweep(self, now: float) -> None:
        """End it if it takes too long. While a request is handled, nothing does."""
        waited_s = now - self._since
        if self._current is not None:
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


def _length(request: Request) -> int:
    """What it announces for its body."""
    return int(request.headers.get("Content-Length", 0))
