# SPDX-License-Identifier: Apache-2.0
"""Two HTTP stacks behind one handler, which passes a request on and its answer back.

One is the proxy's own server and client. The other is uvicorn, with httptools, and
aiohttp's client. Both run on uvloop and decide nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import uvicorn
import uvloop
from kvtax_fleet.proxy.http_server import Request, Server
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.proxy.upstream import forwarded, open_pool, sent_back
from multidict import CIMultiDict

HOST = "127.0.0.1"


def serve_own(instance: str) -> None:
    """Serve by the proxy's own stack until killed; print the URL once it serves."""
    uvloop.run(_serve_own(instance))


async def _serve_own(instance: str) -> None:
    limits = Settings("round_robin")
    pool = open_pool(limits.silence_timeout_s)

    async def answer(request: Request) -> None:
        headers = forwarded(request.headers)
        response = await pool.request(
            "POST", instance, request.path, headers, request.body
        )
        request.begin(response.status, sent_back(response.headers))
        while chunk := await response.chunk():
            request.write(chunk)
        request.end()

    server = Server(
        answer, limits.max_body_bytes, limits.max_held_bytes, limits.client_timeout_s
    )
    listening = await server.listen(HOST, 0)
    _announce(listening)
    await server.sweep_forever()


def serve_by_libraries(instance: str) -> None:
    """Serve by uvicorn and aiohttp until killed; print the URL once it serves."""
    uvloop.run(_serve_by_libraries(instance))


async def _serve_by_libraries(instance: str) -> None:
    # As many connections as there are requests, as in the proxy's own pool.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False
    ) as session:

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            pieces, more = [], True
            while more:
                message = await receive()
                pieces.append(message.get("body", b""))
                more = message.get("more_body", False)
            headers = forwarded(_decoded(scope["headers"]))
            async with session.post(
                instance + scope["path"], data=b"".join(pieces), headers=headers
            ) as response:
                head = [
                    (name.encode(), value.encode())
                    for name, value in sent_back(response.headers).items()
                ]
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status,
                        "headers": head,
                    }
                )
                async for chunk in response.content.iter_any():
                    await send(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                await send({"type": "http.response.body"})

        config = uvicorn.Config(
            answer,
            host=HOST,
            port=0,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_level="error",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        _announce(server.servers[0])
        await serving


def _decoded(headers: list[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    return CIMultiDict((k.decode("latin-1"), v.decode("latin-1")) for k, v in headers)


def _announce(listening: asyncio.Server) -> None:
    print(f"http://{HOST}:{listening.sockets[0].getsockname()[1]}", flush=True)
