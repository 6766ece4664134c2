# SPDX-License-Identifier: Apache-2.0
"""Clients over HTTP: their bodies within a budget, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from multidict import MultiMapping

from kvtax_fleet.proxy.apis import APIS
from kvtax_fleet.proxy.body import Body, BodyError
from kvtax_fleet.proxy.exchange import ClientStalled, Failure, error_event, error_json
from kvtax_fleet.proxy.session_affinity import Sessions
from kvtax_fleet.proxy.upstream import MAX_LINE_BYTES, MAX_LINES, READ_BYTES, forwarded

# Seconds that a connection may be silent between requests, and for what a client still
# sends after an error.
KEEPALIVE_S = 75.0
LINGER_S = 2.0
# Connections that nobody has looked at yet.
BACKLOG = 4096
# What a body takes in memory while it is routed, as a multiple of its bytes.
COPIES = 4
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HELD = web.RequestKey("held_bytes", int)
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Bodies:
    """The bodies of all requests, within a budget of memory.

    A client that sends nothing for `timeout_s` is refused.
    """

    def __init__(
        self, max_body_bytes: int, max_held_bytes: int, timeout_s: float
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    @contextmanager
    def held(self, request: web.BaseRequest) -> Iterator[None]:
        """Hold what `read` reads inside the context."""
        request[_HELD] = 0
        try:
            yield
        finally:
            self._held_bytes -= request[_HELD]

    async def read(self, request: web.BaseRequest) -> bytes:
        """Read the body. Raises Failure."""
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(CONTINUE)
            request.writer.output_size = 0
        pieces: list[bytes] = []
        size = 0
        while piece := await self._piece(request):
            size += len(piece)
            if size > self._max_body_bytes:
                raise self._too_large()
            self._held_bytes += COPIES * len(piece)
            request[_HELD] += COPIES * len(piece)
            if self._held_bytes > self._max_held_bytes:
                raise Failure(503, None, "the proxy is full of requests; try later")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _piece(self, request: web.BaseRequest) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await request.content.readany()
        except TimeoutError:
            why = f"nothing more of the body has come for {self._timeout_s:g} s"
            raise Failure(408, None, why) from None
        except web.RequestPayloadError as error:
            raise Failure(400, None, f"the body cannot be read: {error}") from None

    def _too_large(self) -> Failure:
        limit = self._max_body_bytes
        return Failure(413, None, f"the body is too large: above {limit} bytes")


class HttpClient:
    """A Client over HTTP. `response` is there once it has been answered."""

    def __init__(self, request: web.BaseRequest, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self.path = request.rel_url.raw_path
        self.headers: MultiMapping[str] = forwarded(request.headers)
        self.response: web.StreamResponse | None = None

    @property
    def name(self) -> str:
        return self.headers.get("Authorization") or str(self._request.remote)

    def refuse(self, failure: Failure) -> None:
        if self.response is None:
            self.response = error_response(failure, self.path)
        else:
            self._abort()

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self._sent(self.response.prepare(self._request))

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None
        await self._sent(self.response.write(chunk))

    async def end(self, chunk: bytes = b"") -> None:
        assert self.response is not None
        await self._sent(self.response.write_eof(chunk))

    async def break_off(self, failure: Failure) -> None:
        # A blank line first, to end a torn event.
        await self.write(b"\n\n" + error_event(failure, self.path))

    async def _sent(self, sending: Awaitable[object]) -> None:
        """Wait until the client has taken enough. Raises ConnectionResetError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await sending
        except TimeoutError:
            self._abort()
            why = f"the client took nothing for {self._timeout_s:g} s"
            raise ClientStalled(why) from None

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class Generating(HttpClient):
    """A client of one of the APIs that generate."""

    def __init__(
        self,
        request: web.BaseRequest,
        timeout_s: float,
        bodies: Bodies,
        sessions: Sessions,
    ) -> None:
        super().__init__(request, timeout_s)
        self._bodies = bodies
        self._sessions = sessions

    async def body(self) -> Body:
        raw = await self._bodies.read(self._request)
        try:
            body = Body(raw, APIS[self.path])
        except BodyError as error:
            raise Failure(400, None, str(error)) from None
        if "X-Session-Id" not in self.headers:
            body.session = self._sessions.of(body)
        return body


def json_response(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def error_response(failure: Failure, path: str) -> web.Response:
    """Make the error in the form of the API at `path`."""
    return json_response(failure.status, error_json(failure, path))


@asynccontextmanager
async def answering(
    handle: Handle, host: str, port: int
) -> AsyncIterator[web.ServerRunner]:
    """Handle requests inside the context. Raises OSError.

    The handling of a request ends with its client.
    """
    server = web.Server(
        handle,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        access_log=None,
        read_bufsize=READ_BYTES,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        max_headers=MAX_LINES,
    )
    runner = web.ServerRunner(server, shutdown_timeout=LINGER_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            raise OSError(error.errno, error.strerror, host) from None
        yield runner
    finally:
        await runner.cleanup()
