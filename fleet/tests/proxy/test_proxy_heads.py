# SPDX-License-Identifier: Apache-2.0
"""What reaches an instance, what the proxy reads of a client, and what it logs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvtax_fleet.proxy import http_server
from kvtax_fleet.proxy.http_server import MAX_HEAD_BYTES
from kvtax_fleet.proxy.service import Endpoint, Proxy, serving
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance

BODY = json.dumps({"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}})


@asynccontextmanager
async def recorded(settings: Settings | None = None) -> AsyncIterator[tuple]:
    """A proxy before an instance that takes every path, and what reached that one."""
    reached: list[tuple[str, str, bytes]] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path != "/health":
            reached.append((request.method, request.raw_path, await request.read()))
        return web.json_response({"choices": [{"text": "a"}], "data": []})

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    place = Instance("a", f"http://127.0.0.1:{runner.addresses[0][1]}")
    at = Endpoint("127.0.0.1", 0)
    async with serving([place], settings or Settings("linear"), None, at) as proxy:
        yield proxy, reached
    await runner.cleanup()


async def sent(proxy: Proxy, data: bytes, limit_s: float = 5.0) -> bytes:
    """The answer to these bytes; b"" if the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.ports.clients)
    try:
        writer.write(data)
        async with asyncio.timeout(limit_s):
            return await reader.readuntil(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.close()


def request(method: str, path: str, *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: h", f"Content-Length: {len(BODY)}"]
    return "\r\n".join([*head, *lines, "", BODY]).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/completions?x=1",
        "/%761/completions",
        "/v1/complet%69ons",
        "http://other/v1/completions",
    ],
)
async def test_a_served_path_is_routed_however_it_is_written(path):
    async with recorded() as (proxy, reached):
        assert b" 200 " in await sent(proxy, request("POST", path))
        ((method, arrived, body),) = reached
        assert (method, arrived) == ("POST", "/v1/completions")
        assert b"evil" not in body
        assert proxy.core.ended["a", "ok"] == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", path)
        for path in (
            "/invocations",
            "/inference/v1/generate",
            "/v1/messages",
            "/v1/responses",
            "/v1/embeddings",
            "/sleep",
            "/collective_rpc",
            "/v1/load_lora_adapter",
            "//v1/completions",
            "/v1/../v1/completions",
            "/v1/completions/",
            "/v1%2fcompletions%00",
            "/x%0d%0aX: 1",
        )
    ]
    + [("GET", "/metrics"), ("GET", "/breakdown"), ("DELETE", "/v1/completions")]
    + [("GET", "/v1/completions"), ("POST", "/v1/models"), ("PUT", "/health")],
)
async def test_nothing_else_reaches_an_instance(method, path):
    async with recorded() as (proxy, reached):
        answer = await sent(proxy, request(method, path))
        assert answer.split()[1] in (b"400", b"404", b"405")
        assert reached == []


async def test_models_are_an_instances():
    async with recorded() as (proxy, reached):
        assert b" 200 " in await sent(proxy, request("GET", "/%761/models"))
        assert [each[:2] for each in reached] == [("GET", "/v1/models")]


LINE = b"X-%04d: " + b"a" * 6000 + b"\r\n"


@pytest.mark.parametrize("is_ended", [True, False])
@pytest.mark.parametrize(
    "lines",
    [
        b"".join(LINE % number for number in range(40)),
        b"X: " + b"a" * 2 * MAX_HEAD_BYTES,
        b"".join(b"X-%d: 1\r\n" % number for number in range(20_000)),
    ],
    ids=["long lines", "one line", "many lines"],
)
async def test_a_head_that_is_too_long_is_refused(lines, is_ended):
    end = b"\r\n\r\n" if is_ended else b""
    async with recorded() as (proxy, reached):
        begin = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n"
        answer = await sent(proxy, begin + lines + end)
        assert answer == b"" or answer.split()[1] in (b"400", b"431")
        assert reached == []


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX-A: "])
async def test_a_head_that_does_not_end_in_time_is_cut_off(begin, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.05)
    async with recorded() as (proxy, _):
        assert await sent(proxy, begin, 2.0) == b""


async def test_a_head_may_be_late_after_a_long_answer(monkeypatch):
    """The limit is for a head that has begun; connections may be idle between."""
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.05)
    async with recorded() as (proxy, reached):
        port = proxy.ports.clients
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(request("POST", "/v1/completions"))
            assert b" 200 " in await reader.readuntil(b'"data": []}')
            await asyncio.sleep(0.1)
        assert len(reached) == 2
        writer.close()


async def test_bad_requests_put_no_token_and_few_lines_into_the_log(caplog):
    bad = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\x01\r\n\r\n"
    with caplog.at_level(logging.DEBUG):
        async with recorded() as (proxy, _):
            answers = [await sent(proxy, bad) for _ in range(20)]
            assert {answer.split()[1] for answer in answers} == {b"400"}
    lines = [each for each in caplog.records if each.name.startswith("kvtax_fleet")]
    assert len(lines) == 1
    assert "SECRET" not in caplog.text


async def test_a_body_above_the_limit_is_refused():
    settings = Settings("linear", max_body_bytes=len(BODY) - 1)
    async with recorded(settings) as (proxy, reached):
        answer = await sent(proxy, request("POST", "/v1/completions"))
        assert b" 413 " in answer
        assert reached == []
