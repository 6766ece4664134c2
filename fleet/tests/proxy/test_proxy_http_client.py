# SPDX-License-Identifier: Apache-2.0
"""HTTP towards instances: whole answers, broken ones, and connections that are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fleet.tests.proxy.proxy_lab import DEADLINE_S
from multidict import CIMultiDict

from kvtax_fleet.proxy.http_client import (
    MAX_AHEAD_BYTES,
    BrokenOff,
    NoConnection,
    Pool,
    Response,
    place_of,
)

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"2\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
)
INFORMED = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED
TO_THE_END = b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello"
NONE: CIMultiDict[str] = CIMultiDict()


class Instance:
    """Answers each request on any connection with these pieces."""

    def __init__(self, *pieces: bytes, ends: bool = False, pause_s: float = 0) -> None:
        self.pieces, self.ends, self.pause_s = pieces, ends, pause_s
        self.connections = self.requests = 0
        self.got = b""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                length = head.partition(b"Content-Length: ")[2].partition(b"\r")[0]
                self.got = head + await reader.readexactly(int(length or 0))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)
                if self.ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def asking(
    instance: Instance, silence_s: float = 60, keep_s: float = 60
) -> AsyncIterator[tuple[Pool, str]]:
    listening = await asyncio.start_server(instance.serve, "127.0.0.1", 0)
    pool = Pool(60, silence_s, keep_s)
    async with asyncio.timeout(DEADLINE_S):
        yield pool, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    pool.close()
    listening.close()


async def ask(pool: Pool, url: str, body: bytes = b"asked") -> Response:
    return await pool.request("POST", url, "/p", CIMultiDict({"X-Up": "1"}), body)


@pytest.mark.parametrize("whole", [SIZED, CHUNKED, INFORMED, TO_THE_END])
async def test_an_answer_is_whole_however_cut_and_broken_off_if_it_ends_early(
    whole,
):
    for cut in range(1, len(whole)):
        instance = Instance(whole[:cut], whole[cut:], ends=True)
        async with asking(instance) as (pool, url):
            response = await ask(pool, url)
            assert (response.status, response.headers["X-A"]) == (200, "b")
            assert await response.read() == b"hello"
            assert response.at_end
        begun = whole is TO_THE_END and cut >= len(whole) - 5
        async with asking(Instance(whole[:cut], ends=True)) as (pool, url):
            if begun:
                assert await (await ask(pool, url)).read() == whole[-5:cut]
                continue
            with pytest.raises(BrokenOff):
                await (await ask(pool, url)).read()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot hex\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 400_000,
    ],
)
async def test_what_is_no_answer_is_said_so_at_once(said):
    async with asking(Instance(said)) as (pool, url), asyncio.timeout(30):
        with pytest.raises(BrokenOff):
            await (await ask(pool, url)).read()


async def test_what_is_sent_is_what_was_asked():
    instance = Instance(SIZED)

    async with asking(instance) as (pool, url):
        await ask(pool, f"{url}/base/", b"x" * 100_000)
        host = url.removeprefix("http://").encode()
        assert instance.got == (
            b"POST /base/p HTTP/1.1\r\nX-Up: 1\r\nHost: %b\r\n"
            b"Content-Length: 100000\r\n\r\n%b" % (host, b"x" * 100_000)
        )


async def test_connections_are_kept_while_they_are_used_and_good():
    kept, ends = Instance(SIZED), Instance(SIZED, ends=True)
    closing = Instance(SIZED.replace(b"X-A: b", b"Connection: close"))
    talks = Instance(SIZED + SIZED)
    for instance, connections in ((kept, 1), (ends, 4), (closing, 4), (talks, 4)):
        async with asking(instance) as (pool, url):
            for _ in range(4):
                assert await (await ask(pool, url)).read() == b"hello"
                await asyncio.sleep(0.02)
        assert instance.requests == 4
        assert instance.connections == connections
    async with asking(kept, keep_s=0.05) as (pool, url):
        for _ in range(2):
            await (await ask(pool, url)).read()
            await asyncio.sleep(0.1)
    assert kept.connections == 1 + 2


async def test_an_answer_that_is_given_up_takes_its_connection_along():
    instance = Instance(SIZED[:-2])

    async with asking(instance) as (pool, url):
        for _ in range(2):
            response = await ask(pool, url)
            assert await response.chunk() == b"hel"
            response.close()
            with pytest.raises(BrokenOff):
                await response.chunk()
        assert instance.connections == 2


@pytest.mark.slow
async def test_silence_counts_from_the_last_byte():
    drips = [CHUNKED[n : n + 1] for n in range(len(CHUNKED))]

    async with asking(Instance(*drips, pause_s=0.015), silence_s=1) as (pool, url):
        began = time.monotonic()
        assert await (await ask(pool, url)).read() == b"hello"
        assert time.monotonic() - began > 1
    for silent in (b"", CHUNKED[:5], CHUNKED[:80]):
        async with asking(Instance(silent), silence_s=0.1) as (pool, url):
            with pytest.raises(TimeoutError):
                await (await ask(pool, url)).read()


@pytest.mark.slow
async def test_silence_does_not_count_while_nobody_waits():
    head, middle, last = CHUNKED.partition(b"3\r\n")

    slow = Instance(head, middle + last, pause_s=0.7)
    async with asking(slow, silence_s=0.6) as (pool, url):
        response = await ask(pool, url)
        await response.chunk()
        await asyncio.sleep(0.65)
        await response.read()
    async with asking(Instance(head), silence_s=0.1) as (pool, url):
        response = await ask(pool, url)
        await response.chunk()
        await asyncio.sleep(0.3)
        with pytest.raises(TimeoutError):
            await response.chunk()


@pytest.mark.slow
async def test_an_answer_that_nobody_reads_is_not_taken_in():
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = CHUNKED.partition(b"2\r\n")[0]

    many = Instance(head, *[piece] * 1000, b"0\r\n\r\n")
    async with asking(many) as (pool, url):
        response = await ask(pool, url)
        await asyncio.sleep(0.3)
        first = await response.chunk()
        assert MAX_AHEAD_BYTES < len(first) < 3 * MAX_AHEAD_BYTES
        assert len(first) + len(await response.read()) == 1000 * 0x10000
        # And the connection is as good as any.
        again = await ask(pool, url)
        assert len(await again.read()) == 1000 * 0x10000
        assert many.connections == 1


def test_without_a_connection_it_is_said_why_and_nothing_has_been_sent():
    async def scenario() -> None:
        pool = Pool(0.1, 1, 1)
        with pytest.raises(NoConnection, match="Connect call failed"):
            await ask(pool, "http://127.0.0.1:1")

        async def hangs(*_: object, **__: object) -> None:
            await asyncio.sleep(5)

        asyncio.get_running_loop().create_connection = hangs
        with pytest.raises(NoConnection, match=r"none within 0\.1 s"):
            await ask(pool, "http://127.0.0.1:1")

    asyncio.run(scenario())


def test_places_have_the_usual_ports():
    assert place_of("http://h:8000/v/")[:4] == ("h", 8000, False, "/v")
    assert place_of("https://[::1]")[:4] == ("::1", 443, True, "")
    assert place_of("http://[::1]:81").authority == "[::1]:81"
    assert place_of("unix:///run/k.sock").socket == "/run/k.sock"
