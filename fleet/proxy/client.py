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

from .apis import APIS, COMPLETIONS, MESSAGES, RESPONSES
from .body import Body, BodyError
from .sessions import Sessions
from .tokens import Tokens
from .upstream import Failure

# As docs.anthropic.com/en/api/errors has them.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


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

    def __init__(
        self,
        request: web.Request,
        timeout_s: float,
        sessions: Sessions,
        tokens: Tokens,
    ) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._sessions = sessions
        self._tokens = tokens
        self.path = request.path
        self.headers = request.headers

    async def body(self) -> Body:
        raw = await read(self._request)
        try:
            body = Body(raw, APIS[self.path])
        except BodyError as error:
            raise Failure(400, None, str(error)) from None
        # By what the client has sent: a template may write the history anew.
        if "X-Session-Id" not in self.headers:
            body.session = self._sessions.of(body)
        await self._tokens.find(body)
        return body

    def refuse(self, failure: Failure) -> None:
        self.response = error_response(failure, self.path)

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
        await self.write(b"\n\n" + error_event(failure, self.path))
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


async def read(request: web.Request) -> bytes:
    """The request's body. Raises Failure if it is too large."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Failure(413, None, f"the body is too large: {error.text}") from None


def error_json(error: Failure, path: str = COMPLETIONS) -> bytes:
    """An error as the API at `path` gives it, with the instance that failed."""
    status, said = error.status, {"message": str(error), "instance": error.instance}
    if path.startswith(MESSAGES):
        type_ = _ANTHROPIC_TYPES.get(status, "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": type_, **said}})
    openai = {**said, "type": "proxy_error", "param": None, "code": status}
    return msgspec.json.encode({"error": openai})


def error_event(error: Failure, path: str) -> bytes:
    """An error inside a stream of the API at `path`."""
    said = error_json(error, path)
    if path == RESPONSES:
        # OpenAI's clients look for `error`, its documentation has a type and a message.
        fields = {"type": "error", "message": str(error), "error": msgspec.Raw(said)}
        said = msgspec.json.encode({**fields, **msgspec.json.decode(said)})
    event = b"data: " + said + b"\n\n"
    return b"event: error\n" + event if path in (MESSAGES, RESPONSES) else event


def error_response(error: Failure, path: str = COMPLETIONS) -> web.Response:
    body = error_json(error, path)
    return web.Response(status=error.status, body=body, content_type="application/json")
