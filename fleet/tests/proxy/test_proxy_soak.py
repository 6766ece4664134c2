# SPDX-License-Identifier: Apache-2.0
"""A long day of the proxy: many clients, hostile ones among them, failing instances.

SOAK_REQUESTS=100000 pytest -s -m long fleet/tests/proxy/test_proxy_soak.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from urllib.parse import urlsplit

import pytest
from fleet.tests.proxy.proxy_lab import Proxy, free_port, proxy, resident_bytes, until

from kvtax_fleet.records.instances import Instance

pytestmark = pytest.mark.long

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "100000"))
CLIENTS = 48
MIB = 2**20
HELD_BYTES = 64 * MIB
# For what does not grow with requests: modules, buffers, the mirror, the decisions.
OTHER_BYTES = 128 * MIB
BODY_BYTES = 4 * MIB
# For one answer, on a machine that may stand still.
ANSWER_S = 180.0
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"choices": [{"index": 0, "text": "a"}]}'
REFUSED = b'{"error": {"message": "broken", "code": 500}}'


def framed(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def sized(status: int, body: bytes) -> bytes:
    kind = b"Content-Type: application/json"
    return b"HTTP/1.1 %d X\r\n%b\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        kind,
        len(body),
        body,
    )


class Engine:
    """An instance that fails a share of its requests, and answers /health well."""

    def __init__(self, chance: random.Random, fails: float) -> None:
        self.chance, self.fails = chance, fails
        self.connections: set[Writer] = set()

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2]
                body = await reader.readexactly(int(length.split()[0]) if length else 0)
                if head.startswith(b"GET "):
                    writer.write(sized(200, b"{}"))
                else:
                    await self.answer(writer, b'"stream": true' in body[-100:])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def answer(self, writer: Writer, stream: bool) -> None:
        fails = self.chance.random() < self.fails
        if fails and self.chance.random() < 0.5:
            writer.write(sized(500, REFUSED))
            return
        if not stream:
            if fails:
                raise ConnectionResetError
            writer.write(sized(200, WHOLE))
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + framed(EVENT))
        await asyncio.sleep(0.01)
        if fails:
            writer.transport.abort()
            raise ConnectionResetError
        writer.write(framed(EVENT + DONE) + b"0\r\n\r\n")


@asynccontextmanager
async def listening(engine: Engine, port: int = 0) -> AsyncIterator[str]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in list(engine.connections):
            writer.transport.abort()


def ask(body: bytes, *lines: str) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "Host: h", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *lines, "", ""]).encode() + body


def prompt(chance: random.Random, tokens: int) -> bytes:
    ids = [chance.randrange(100_000)] * tokens
    asked = {"model": "m", "prompt": ids, "max_tokens": 2}
    return json.dumps(asked | {"stream": chance.random() < 0.5}).encode()


INVALID = (
    ask(b"{"),
    ask(b"x" * (BODY_BYTES + 1)),
    ask(b"{}", f"A: {'a' * 70_000}"),
    ask(b"{}", "Content-Encoding: gzip"),
    b"\x16\x03\x01 no HTTP\r\n\r\n",
)


class Clients:
    """Clients of all kinds, `left` requests in all.

    `answered` counts answers by kind and status; `unanswered` says what had none.
    """

    def __init__(self, port: int, chance: random.Random, left: int) -> None:
        self.port, self.chance, self.left = port, chance, left
        self.answered: Counter[str] = Counter()
        self.unanswered: list[str] = []
        self.endless: list[Writer] = []

    async def run(self) -> None:
        """Be one client after the other until all requests have been sent."""
        kinds = {
            self.well_behaved: 80,
            self.ahead: 4,
            self.half_closed: 4,
            self.gone: 4,
            self.large: 2,
            self.invalid: 4,
            self.never_whole: 2,
        }
        while self.left > 0:
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await kind(reader, writer)
            except (TimeoutError, OSError, EOFError) as error:
                self.unanswered.append(f"{kind.__name__}: {error!r}")
            if writer not in self.endless:
                writer.close()

    async def answer(self, kind: str, reader: Reader) -> bool:
        """Read an answer to its end; return whether another may follow.

        Raises TimeoutError, and what `reader` raises.
        """
        async with asyncio.timeout(ANSWER_S):
            return await self._answer(kind, reader)

    async def _answer(self, kind: str, reader: Reader) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100 "):
            head = await reader.readuntil(b"\r\n\r\n")
        broken = False
        length = head.lower().partition(b"content-length: ")[2]
        if length:
            await reader.readexactly(int(length.split()[0]))
        else:
            body = await reader.readuntil(b"\r\n0\r\n\r\n")
            broken = b'data: {"error"' in body
            assert broken or DONE in body, body
        self.answered[f"{kind}: {int(head.split()[1])}{' broken' * broken}"] += 1
        return not (broken or b"Connection: close" in head)

    async def well_behaved(self, reader: Reader, writer: Writer) -> None:
        session = f"X-Session-Id: {self.chance.randrange(10**6):060}"
        for _ in range(self.chance.randrange(1, 30)):
            self.left -= 1
            writer.write(ask(prompt(self.chance, 20), session))
            if not await self.answer("well behaved", reader):
                return

    async def ahead(self, reader: Reader, writer: Writer) -> None:
        self.left -= 5
        writer.write(b"".join(ask(prompt(self.chance, 20)) for _ in range(5)))
        for _ in range(5):
            if not await self.answer("ahead", reader):
                return

    async def half_closed(self, reader: Reader, writer: Writer) -> None:
        self.left -= 1
        writer.write(ask(prompt(self.chance, 20)))
        writer.write_eof()
        await self.answer("half-closed", reader)

    async def gone(self, _: Reader, writer: Writer) -> None:
        self.left -= 1
        writer.write(ask(prompt(self.chance, 20)))
        await asyncio.sleep(self.chance.random() / 20)
        writer.transport.abort()

    async def large(self, reader: Reader, writer: Writer) -> None:
        self.left -= 1
        writer.write(ask(prompt(self.chance, 200_000)))
        await self.answer("large", reader)

    async def invalid(self, reader: Reader, writer: Writer) -> None:
        self.left -= 1
        writer.write(self.chance.choice(INVALID))
        await self.answer("invalid", reader)

    async def never_whole(self, _: Reader, writer: Writer) -> None:
        self.left -= 1
        writer.write(ask(prompt(self.chance, 20_000))[: -self.chance.randrange(1, 99)])
        self.endless.append(writer)


async def flap(engine: Engine, port: int) -> None:
    """Serve at the port, and do not, by turns, until cancelled."""
    while True:
        async with listening(engine, port):
            await asyncio.sleep(3)
        await asyncio.sleep(3)


def numbered(on: Proxy) -> bool:
    """Return whether no number of a request is left out of the end lines."""
    numbers = sorted(end["number"] for end in on.lines("end"))
    return numbers == list(range(len(numbers)))


async def watch(on: Proxy, peak: list[int]) -> None:
    """Note the most memory that the proxy has, until cancelled."""
    while True:
        peak[0] = max(peak[0], resident_bytes(on.process.pid))
        await asyncio.sleep(0.2)


async def test_no_request_is_lost_and_memory_stays_in_its_budget(tmp_path):
    chance = random.Random(1)
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(listening(Engine(chance, fails)))
            for fails in (0.0, 0.03, 1.0)
        ]
        port = free_port()
        urls.append(f"http://127.0.0.1:{port}")
        instances = [
            Instance(name, url) for name, url in zip("abcd", urls, strict=True)
        ]
        options = ["--max-held-bytes", str(HELD_BYTES)]
        options += ["--max-body-bytes", str(BODY_BYTES)]
        starting = proxy(tmp_path, instances, "linear", *options)
        on = await asyncio.to_thread(starting.__enter__)
        stack.push(starting.__exit__)
        peak = [0]
        others = [
            asyncio.create_task(flap(Engine(chance, 0.0), port)),
            asyncio.create_task(watch(on, peak)),
        ]
        clients = Clients(urlsplit(on.url).port, chance, REQUESTS)
        began = monotonic()
        await asyncio.gather(*(clients.run() for _ in range(CLIENTS)))
        seconds = monotonic() - began
        for writer in clients.endless:
            writer.close()
        await asyncio.to_thread(on.idle)
        for task in others:
            task.cancel()
        # Requests of which the proxy never had the whole are at no instance.
        await asyncio.to_thread(until, lambda: numbered(on), "end lines are missing")
        ends = on.lines("end")
        print(
            f"{REQUESTS} requests in {seconds:.0f} s, {peak[0] / MIB:.0f} MiB at most"
        )
        for kind, count in sorted(clients.answered.items()):
            print(f"{count:7} {kind}")
    assert clients.unanswered == []
    assert {end["status"] for end in ends} >= {"ok", "failed", "refused", "client_gone"}
    served = clients.answered["well behaved: 200"]
    failed = sum(clients.answered[f"well behaved: {status}"] for status in (500, 502))
    assert failed < 0.1 * served
    assert peak[0] < HELD_BYTES + OTHER_BYTES
