# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP server with a handler of one's own, and clients that send bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from multidict import CIMultiDict

from fleet.proxy.http.request import Request
from fleet.proxy.http.server import Handle, Server

LIMIT_BYTES = 1000
DEADLINE_S = 10
Dial = Callable[[], Awaitable["Wire"]]


async def echo(request: Request) -> None:
    """Says what it was asked; a path of its own asks for a stream."""
    said = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "body": request.body.decode("latin-1"),
        "over": request.over_bytes,
        "headers": sorted(request.headers),
    }
    kind = CIMultiDict({"Content-Type": "application/json"})
    if request.path != "/stream":
        request.whole(200, kind, json.dumps(said).encode())
        return
    request.begin(200, kind)
    for piece in (b"one,", b"", b"two,"):
        request.write(piece)
        await asyncio.sleep(0)
    request.end(b"three")


class Wire:
    """A client that sends and reads bytes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().strip().split("\r\n")
        named = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), dict(named)

    async def answer(self) -> tuple[int, dict]:
        """Status and JSON of an answer that is not a stream."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["Content-Length"]))
        return status, json.loads(body)

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    async def is_gone(self) -> None:
        """Returns once the server has ended the connection in the middle."""
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await self.answer()


@asynccontextmanager
async def serving(
    handle: Handle = echo,
    client_timeout_s: float = DEADLINE_S,
    max_body_bytes: int = LIMIT_BYTES,
) -> AsyncIterator[Dial]:
    serves = Server(handle, max_body_bytes, client_timeout_s)
    listening = await serves.listen("127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    sweeping = asyncio.create_task(serves.sweep_forever())
    wires: list[Wire] = []

    async def dial() -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", port)))
        return wires[-1]

    try:
        yield dial
    finally:
        for wire in wires:
            wire.writer.close()
        sweeping.cancel()
        listening.close()
        await serves.close()
        assert serves.connections == set()


def ask(body: bytes = b"", *lines: str, path: str = "/a?b=c") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body
