# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: what it asks, and where its answer goes.

The rest of the proxy knows only the Client: HTTP is here, and what stands in virtual
time for it elsewhere.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from multidict import CIMultiDict, MultiMapping

from .apis import APIS, COMPLETIONS, MESSAGES, RESPONSES
from .body import Body, BodyError
from .http.request import Request
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
    """A Client over HTTP."""

    def __init__(self, request: Request, sessions: Sessions, tokens: Tokens) -> None:
        self._request = request
        self._sessions = sessions
        self._tokens = tokens
        self.path = request.path
        self.headers = request.headers

    async def body(self) -> Body:
        raw = read(self._request)
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
        answer_error(self._request, failure)

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        self._request.whole(status, headers, body)

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        self._request.begin(status, headers)

    async def write(self, chunk: bytes) -> None:
        self._request.write(chunk)
        if self._request.connection.held_up:
            await self._request.connection.taken()

    async def end(self, chunk: bytes = b"") -> None:
        self._request.end(chunk)
        if self._request.connection.held_up:
            await self._request.connection.taken()

    async def break_off(self, failure: Failure) -> None:
        # The blank line before it ends a torn event.
        self._request.keep_alive = False
        await self.write(b"\n\n" + error_event(failure, self.path))


def read(request: Request) -> bytes:
    """The request's body. Raises Failure if it is too large."""
    if (limit := request.over_bytes) is not None:
        raise Failure(413, None, f"the body is too large: at most {limit} bytes")
    return request.body


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


def answer_json(request: Request, status: int, body: bytes) -> None:
    """Answer with this JSON."""
    request.whole(status, CIMultiDict({"Content-Type": "application/json"}), body)


def answer_error(request: Request, failure: Failure) -> None:
    """Answer with an error as the API that was asked gives it."""
    answer_json(request, failure.status, error_json(failure, request.path))
