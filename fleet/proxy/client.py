# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: what it asks, and where its answer goes.

The rest of the proxy knows only the Client: HTTP is here, and what stands in virtual
time for it elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

import msgspec
from aiohttp import web
from multidict import MultiMapping

from .body import Body, BodyError
from .upstream import Failure

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class ClientStalled(ConnectionResetError):
    """The client has stopped reading, and its connection has been ended."""


class Client(Protocol):
    """Whoever sent a request. What sends raises ConnectionResetError if it is gone."""

    path: str
    headers: MultiMapping[str]

    async def body(self) -> Body:
        """Raises Failure if it is too large or no JSON object."""

    def refuse(self, failure: Failure) -> None:
        """Answer with an error, instead of anything else."""

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        """Answer with all of `body`."""

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin a stream."""

    async def write(self, chunk: bytes) -> None:
        """The stream's next chunk, as fast as the client takes it."""

    async def end(self, chunk: bytes = b"") -> None:
        """The stream's last chunk."""

    async def break_off(self, failure: Failure) -> None:
        """Send an error event in place of the rest; `end` follows."""


class HttpClient:
    """A Client over HTTP; `response` is there once it has been answered.

    One that takes nothing for `timeout_s` is cut (ClientStalled).
    """

    response: web.StreamResponse

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self.path = request.path
        self.headers = request.headers

    async def body(self) -> Body:
        try:
            return Body(await self._request.read(), self.path == CHAT)
        except web.HTTPRequestEntityTooLarge as error:
            raise Failure(413, None, f"the body is too large: {error.text}") from None
        except BodyError as error:
            raise Failure(400, None, str(error)) from None

    def refuse(self, failure: Failure) -> None:
        self.response = error_response(failure)

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        self.response = web.Response(status=status, headers=headers, body=body)

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        await self._taken(self.response.write(chunk))

    async def end(self, chunk: bytes = b"") -> None:
        await self._taken(self.response.write_eof(chunk))

    async def break_off(self, failure: Failure) -> None:
        # The blank line before it ends a torn event.
        await self.write(b"\n\ndata: " + error_json(failure) + b"\n\n")
        self.response.force_close()

    async def _taken(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await writing
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            what = f"the client took nothing for {self._timeout_s:g} s"
            raise ClientStalled(what) from None


def error_json(error: Failure) -> bytes:
    """An error as OpenAI's API gives it, with the instance that failed."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": "proxy_error",
                "code": error.status,
                "instance": error.instance,
            }
        }
    )


def error_response(error: Failure) -> web.Response:
    return web.Response(
        status=error.status, body=error_json(error), content_type="application/json"
    )
