# SPDX-License-Identifier: Apache-2.0
"""Clients over HTTP: their heads and bodies within limits, and their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from multidict import MultiMapping

from kvtax_fleet.proxy.apis import APIS
from kvtax_fleet.proxy.body import Body, BodyError
from kvtax_fleet.proxy.exchange import Failure, error_event, error_json
from kvtax_fleet.proxy.upstream import READ_BYTES, forwarded

# Seconds that a connection may be silent between requests, and for what a client still
# sends after an error.
KEEPALIVE_S = 75.0
LINGER_S = 2.0
# Connections that nobody has looked at yet.
BACKLOG = 4096
# Limits of a request's head: bytes and lines; seconds from its first byte, or from the
# connection's beginning, to its last.
MAX_HEAD_BYTES = 1 << 16
MAX_HEAD_LINES = 128
MAX_HEAD_S = 10.0
# Seconds between two lines of the log about bad requests.
LOG_EVERY_S = 10.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


class HttpClient:
    """A Client over HTTP, of the API at `path`.

    `response` is there once it has been answered.
    """

    def __init__(
        self, request: web.BaseRequest, path: str, max_body_bytes: int
    ) -> None:
        self._request = request
        self._max_body_bytes = max_body_bytes
        self.path = path
        self.headers: MultiMapping[str] = forwarded(request.headers)
        self.response: web.StreamResponse | None = None

    async def body(self) -> Body:
        try:
            return Body(await self._read(), APIS[self.path])
        except BodyError as error:
            raise Failure(400, None, str(error)) from None

    async def _read(self) -> bytes:
        """Read the body. Raises Failure."""
        request, limit = self._request, self._max_body_bytes
        too_large = Failure(413, None, f"the body is too large: above {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(CONTINUE)
            request.writer.output_size = 0
        pieces: list[bytes] = []
        size_bytes = 0
        while piece := await self._piece():
            size_bytes += len(piece)
            if size_bytes > limit:
                raise too_large
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _piece(self) -> bytes:
        try:
            return await self._request.content.readany()
        except web.RequestPayloadError as error:
            why = f"the body cannot be read: {type(error).__name__}"
            raise Failure(400, None, why) from None

    def refuse(self, failure: Failure) -> None:
        if self.response is None:
            self.response = error_response(failure)
        else:
            self._abort()

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None
        await self.response.write(chunk)

    async def end(self, chunk: bytes = b"") -> None:
        assert self.response is not None
        await self.response.write_eof(chunk)

    async def break_off(self, failure: Failure) -> None:
        # A blank line first, to end a torn event.
        await self.write(b"\n\n" + error_event(failure))

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class _BadRequests:
    """A count of requests that are no HTTP; the log has nothing else of them."""

    def __init__(self) -> None:
        self._count = 0
        self._logged_s = float("-inf")

    def note(self, now_s: float) -> None:
        """Count a bad request."""
        self._count += 1
        if now_s - self._logged_s >= LOG_EVERY_S:
            log.warning("requests that are no HTTP so far: %d", self._count)
            self._logged_s = now_s


class _Connection(RequestHandler):
    """A client's connection; one whose head is too long or late is closed."""

    def __init__(self, server: web.Server, bad: _BadRequests, **options: Any) -> None:
        super().__init__(server, **options)
        self._bad = bad
        self._head_bytes = 0
        self._too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._too_late = self._loop.call_later(MAX_HEAD_S, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        awaits_head = self._waiter is not None and not self._waiter.done()
        heads = self._request_count
        super().data_received(data)
        if self._request_count > heads:
            self._end_head()
        elif awaits_head:
            self._head_bytes += len(data)
            if self._too_late is None:
                self._too_late = self._loop.call_later(MAX_HEAD_S, self.force_close)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.force_close()

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is no HTTP, or that could not be handled."""
        if status == 400:
            self._bad.note(self._loop.time())
        else:
            log.error("a request could not be handled", exc_info=exc)
        why = "the request is no HTTP" if status == 400 else "the proxy failed"
        response = error_response(Failure(status, None, why))
        response.force_close()
        return response


class _Server(web.Server):
    """A server whose connections are ours."""

    def __init__(self, handle: Handle, **options: Any) -> None:
        super().__init__(handle, handler_cancellation=True, **options)
        self._bad = _BadRequests()

    def __call__(self) -> RequestHandler:
        return _Connection(self, self._bad, loop=self._loop, **self._kwargs)


def check_head(request: web.BaseRequest) -> None:
    """Raise Failure if the head is too long."""
    sizes = (len(name) + len(value) + 4 for name, value in request.raw_headers)
    if sum(sizes) + len(request.raw_path) > MAX_HEAD_BYTES:
        raise Failure(431, None, f"the head is too long: above {MAX_HEAD_BYTES} bytes")


def json_response(status: int, body: bytes) -> web.Response:
    """Make a response in JSON."""
    return web.Response(status=status, body=body, content_type="application/json")


def error_response(failure: Failure) -> web.Response:
    """Make the response that tells a failure."""
    return json_response(failure.status, error_json(failure))


@asynccontextmanager
async def answering(
    handle: Handle, host: str, port: int
) -> AsyncIterator[web.ServerRunner]:
    """Handle requests inside the context. Raises OSError.

    The handling of a request ends with its client.
    """
    server = _Server(
        handle,
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        access_log=None,
        read_bufsize=READ_BYTES,
        max_headers=MAX_HEAD_LINES,
        max_field_size=MAX_HEAD_BYTES // 2,
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
