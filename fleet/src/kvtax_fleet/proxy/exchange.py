# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the proxy, and the client that sent it.

Client is all that the rest of the proxy knows of a client: over HTTP, or in virtual
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from hmac import compare_digest
from typing import Generic, Protocol

import msgspec
from multidict import CIMultiDict, MultiMapping

from kvtax_fleet.records.decisions import DecisionEnd

from .apis import APIS, COMPLETIONS, MESSAGES, RESPONSES
from .body import Body, BodyError, Payload, RequestBody
from .http_server import Handle, Request
from .loads import Flight
from .router import Route
from .session_affinity import Sessions
from .tokenizer import Tokens
from .upstream import Failure, UnknownModel, forwarded

# Characters of a request's or a session's name, above which its hash stands for it.
MAX_NAME_CHARS = 256
# From docs.anthropic.com/en/api/errors.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class Client(Protocol[Payload]):
    """The sender of a request. Sending raises ConnectionResetError if it is gone."""

    @property
    def path(self) -> str:
        """The path of the API."""

    @property
    def headers(self) -> MultiMapping[str]:
        """The request's headers."""

    async def body(self) -> RequestBody[Payload]:
        """Read the body. Raises Failure if it is too large or no JSON object."""

    def refuse(self, failure: Failure) -> None:
        """Answer with an error, instead of anything else."""

    def whole(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        """Answer with all of `body`."""

    async def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin a stream."""

    async def write(self, chunk: bytes) -> None:
        """Send the stream's next chunk, as fast as the client takes it."""

    async def end(self, chunk: bytes = b"") -> None:
        """Send the stream's last chunk."""

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
        # From the client's bytes: a template may write the history anew.
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
        # A blank line first, to end a torn event.
        self._request.keep_alive = False
        await self.write(b"\n\n" + error_event(failure, self.path))


def read(request: Request) -> bytes:
    """Return the request's body. Raises Failure if it was refused."""
    if request.refusal is not None:
        status, reason = request.refusal
        raise Failure(status, None, reason)
    return request.body


def error_json(error: Failure, path: str = COMPLETIONS) -> bytes:
    """Encode an error as the API at `path` does, with the instance that failed."""
    status = error.status
    message = f"{error}: {error.quoted}" if error.quoted else str(error)
    kind, param, anthropic_kind = "proxy_error", None, _ANTHROPIC_TYPES.get(status)
    if isinstance(error, UnknownModel):  # as vLLM
        message = f"The model `{error.quoted}` does not exist."
        kind, param, anthropic_kind = "NotFoundError", "model", "NotFoundError"
    text = {"message": message, "instance": error.instance}
    if path.startswith(MESSAGES):
        kind = anthropic_kind or "api_error"
        return msgspec.json.encode({"type": "error", "error": {"type": kind, **text}})
    openai = {**text, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": openai})


def error_event(error: Failure, path: str) -> bytes:
    """Encode an error inside a stream of the API at `path`."""
    data = error_json(error, path)
    if path == RESPONSES:
        # OpenAI's clients look for `error`, its documentation has a type and a message.
        fields = {"type": "error", "message": str(error), "error": msgspec.Raw(data)}
        data = msgspec.json.encode({**fields, **msgspec.json.decode(data)})
    event = b"data: " + data + b"\n\n"
    return b"event: error\n" + event if path in (MESSAGES, RESPONSES) else event


def answer_json(request: Request, status: int, body: bytes) -> None:
    """Answer with this JSON."""
    request.whole(status, CIMultiDict({"Content-Type": "application/json"}), body)


def answer_error(request: Request, failure: Failure) -> None:
    """Answer with an error in the form of the request's API."""
    answer_json(request, failure.status, error_json(failure, request.path))


Routes = Mapping[str, tuple[str, Handle]]


async def routed(routes: Routes, request: Request) -> None:
    """Answer a request by its path, which is served for one method."""
    if (fault := request.fault()) is not None:
        request.keep_alive = False
        answer_error(request, Failure(fault[0], None, fault[1]))
        return
    method, handle = routes.get(request.path, ("", None))
    if handle is None:
        failure = Failure(404, None, f"{request.path}: not served here")
        answer_error(request, failure)
    elif method != request.method:
        message = f"{request.path}: served for {method} only"
        answer_error(request, Failure(405, None, message))
    else:
        await handle(request)


def gets(handles: Mapping[str, Handle], authorization: str | None) -> Handle:
    """Return a handle for GET requests by path, which may need this header."""
    routes = {path: ("GET", handle) for path, handle in handles.items()}

    async def answer(request: Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if authorization is None or compare_digest(given, authorization.encode()):
            await routed(routes, request)
        else:
            answer_error(request, Failure(401, None, "a token is needed"))

    return answer


def _bounded(name: str | None) -> str | None:
    """Return the name that a client gave, or its hash if it is long.

    Names are kept: by pins, the last decisions and the log.
    """
    if name is None or len(name) <= MAX_NAME_CHARS:
        return name
    return f"sha256:{sha256(name.encode(errors='surrogatepass')).hexdigest()}"


class Exchange(Generic[Payload]):
    """A request from its arrival to its end.

    `end`: its last line in the decision log, filled in on the way. `body`: there after
    `read_body`. `cached_tokens`: tokens of the prompt that each instance has cached,
    None where unknown. `route`, `flight`: there once an instance has been chosen; a
    second attempt replaces them. `lacking`: instances that do not serve the
    model. `suspects`: instances that have failed it. `visits`: to the instances that
    are requested for it.
    """

    __slots__ = (
        "body",
        "cached_tokens",
        "client",
        "end",
        "flight",
        "headers",
        "lacking",
        "route",
        "suspects",
        "visits",
    )
    body: RequestBody[Payload]
    route: Route
    flight: Flight
    visits: ExitStack

    def __init__(self, client: Client[Payload], number: int) -> None:
        self.client = client
        self.headers = forwarded(client.headers)
        self.cached_tokens: list[int] | None = None
        self.lacking: set[str] = set()
        self.suspects: list[str] = []
        self.end = DecisionEnd(
            id=_bounded(client.headers.get("X-Request-Id")) or f"kvtax/{number}",
            number=number,
            session=_bounded(client.headers.get("X-Session-Id")),
        )

    @property
    def path(self) -> str:
        return self.client.path

    async def read_body(self) -> None:
        """Read the body. Raises Failure if it is too large or no JSON object."""
        self.body = await self.client.body()
        if self.end.session is None:
            self.end.session = self.body.session
