# SPDX-License-Identifier: Apache-2.0
"""A client's request, and the way for its answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal, Protocol

from httptools import HttpRequestParser, parse_url
from multidict import CIMultiDict, MultiMapping

from .heads import written

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class ClientStalled(ConnectionResetError):
    """The client has stopped reading, and its connection has been ended."""


class Connection(Protocol):
    """What a request needs of the connection that it came by."""

    held_up: bool
    """The client takes less than it is sent."""

    def send(self, data: bytes) -> None:
        """Raises ConnectionResetError if the client is gone."""

    async def taken(self) -> None:
        """Returns once it takes more, or is gone. Raises ClientStalled."""


class Request:
    """It is whole when it is handled. Who asks for the head only is a GET, too.

    `over_bytes`: the limit that its body is over; it was left out.
    `keep_alive`: another request may follow on the connection.
    """

    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    _chunked = False
    _head_only = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.target = b""
        self.over_bytes: int | None = None
        self.keep_alive = False
        self.state: Literal["asked", "begun", "answered"] = "asked"
        self._pieces: list[bytes] = []
        self._unsent = b""

    def headed(self, parser: HttpRequestParser, lines: list[tuple[str, str]]) -> None:
        """Its head is here. HTTP/1.0 has no chunks: there, the end ends a stream.

        Raises HttpParserError if its target is no URL.
        """
        method, url = parser.get_method().decode(), parse_url(self.target)
        self._head_only = method == "HEAD"
        self.method = "GET" if self._head_only else method
        self.path, self.query = (url.path or b"/").decode(), (url.query or b"").decode()
        self.headers = CIMultiDict(lines)
        self._chunked = parser.get_http_version() == "1.1"
        self.keep_alive = self._chunked and parser.should_keep_alive()

    def add(self, piece: bytes) -> None:
        """The next piece of its body."""
        self._pieces.append(piece)

    def complete(self) -> None:
        """All of its body is here, or will be."""
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

    def begin(self, status: int, headers: MultiMapping[str]) -> None:
        """Begin a stream; its head goes out with the first chunk."""
        self.state = "begun"
        own = ("Transfer-Encoding: chunked",) if self._chunked else ()
        self._unsent = self._head(status, headers, *own)

    def write(self, chunk: bytes) -> None:
        """The stream's next chunk; nothing once it has ended."""
        if self.state == "begun":
            self._send(self._framed(chunk))

    def end(self, chunk: bytes = b"") -> None:
        """The stream's last chunk, which may be empty. Once is enough."""
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
        return written(line, headers, *own)

    def _framed(self, chunk: bytes) -> bytes:
        if not (chunk and self._chunked):
            return chunk
        return b"%x\r\n%b\r\n" % (len(chunk), chunk)
