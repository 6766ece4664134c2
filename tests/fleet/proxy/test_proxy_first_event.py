# SPDX-License-Identifier: Apache-2.0
"""The first event decides an answer's status, however TCP cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from proxy_lab import ask

from fleet.proxy.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fleet.proxy.app import serving
from fleet.proxy.settings import Settings
from fleet.proxy.upstream import MAX_FIRST_EVENT_BYTES
from lab.records.instances import Instance

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
ERROR = b'data: {"error": {"message": "engine died"}}\n\n'
USAGE = b'data: {"choices": [], "usage": {"total_tokens": 1}}\n\n'
DONE = b"data: [DONE]\n\n"

START = b'event: message_start\ndata: {"type":"message_start"}\n\n'
NOTHING = b'event: message_delta\ndata: {"usage":{"output_tokens":0}}\n\n'
SPENT = b'event: message_delta\ndata: {"usage":{"output_tokens":1}}\n\n'
WRONG = b'event: error\ndata: {"type":"error"}\n\n'
CREATED = b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
COMPLETED = (
    b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":0}}}'
)


class Pieces:
    """An instance whose stream comes in these pieces, and then ends or stays open."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ends = True

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.005)
        if not self.ends:
            await asyncio.sleep(60)
        return response


class Client:
    def __init__(self, instance: Pieces, session: aiohttp.ClientSession, url: str):
        self._instance, self._session, self._url = instance, session, url

    async def status(
        self, *pieces: bytes, ends: bool = True, path: str = COMPLETIONS
    ) -> int:
        """The status of the answer when the stream comes in these pieces."""
        self._instance.pieces, self._instance.ends = list(pieces), ends
        async with self._session.post(self._url + path, json=ask()) as answer:
            return answer.status


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    instance = Pieces()
    app = web.Application()
    app.router.add_post("/{path:.*}", instance.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    place = Instance("a", f"http://127.0.0.1:{runner.addresses[0][1]}")
    at = serving([place], Settings("round_robin"), None, "127.0.0.1", 0)
    async with at as port, aiohttp.ClientSession() as session:
        yield Client(instance, session, f"http://127.0.0.1:{port}")
    await runner.cleanup()


FAILURES = {
    "error": (CHAT, ERROR),
    "usage": (CHAT, USAGE + DONE),
    "end": (CHAT, DONE),
    "role, error": (CHAT, ROLE + ERROR),
    "role, usage": (CHAT, ROLE + USAGE + DONE),
    "role, end": (CHAT, ROLE + DONE),
    "message, error": (MESSAGES, START + WRONG),
    "message, end": (MESSAGES, START + NOTHING),
    "response, error": (RESPONSES, CREATED + WRONG),
    "response, end": (RESPONSES, CREATED + COMPLETED + b"\n\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
def test_no_cut_makes_a_failure_a_200(case: str) -> None:
    path, whole = FAILURES[case]

    async def scenario() -> None:
        async with client() as on:
            for cut in range(1, len(whole), 3):
                status = await on.status(whole[:cut], whole[cut:], path=path)
                assert status == 502, f"{whole[:cut]} | {whole[cut:]}"
            single = (bytes([one]) for one in whole)
            assert await on.status(*single, path=path) == 502

    asyncio.run(scenario())


def test_a_stream_that_ends_in_its_first_event_is_a_failure() -> None:
    async def scenario() -> None:
        async with client() as on:
            assert await on.status(b'data: {"err') == 502
            assert await on.status(ROLE, TOKEN[:-2]) == 502

    asyncio.run(scenario())


def test_an_answer_waits_for_its_first_event_and_for_no_more() -> None:
    async def scenario() -> None:
        async with client() as on, asyncio.timeout(20):
            assert await on.status(TOKEN, ends=False) == 200
            assert await on.status(TOKEN[:9], TOKEN[9:], ends=False) == 200
            # A model may have nothing to say, and have computed for it.
            assert await on.status(START, SPENT, ends=False, path=MESSAGES) == 200
            # Nor for the end of an event that has none.
            endless = b"data: " + b"x" * MAX_FIRST_EVENT_BYTES
            assert await on.status(endless, ends=False) == 200

    asyncio.run(scenario())
