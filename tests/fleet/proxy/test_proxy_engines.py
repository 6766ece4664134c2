# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one address: each is an instance, which requests name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from proxy_lab import ask

from fleet.instances import InstancesError, read_instances, write_instances
from fleet.proxy.app import serving
from fleet.proxy.settings import Settings
from lab.records.instances import Instance

RANK = "X-data-parallel-rank"


def engines(*ranks: int | None) -> list[Instance]:
    return [
        Instance(f"i{place}", "http://h", data_parallel_rank=rank)
        for place, rank in enumerate(ranks)
    ]


def test_a_request_names_the_engine_that_it_is_for() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.getall(RANK, []))
        return web.json_response({})

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        both = [Instance(f"i{n}", url, data_parallel_rank=n) for n in (0, 1)]
        at = serving(both, Settings("round_robin"), None, "127.0.0.1", 0)
        async with at as port, aiohttp.ClientSession() as session:
            there = f"http://127.0.0.1:{port}/v1/completions"
            for _ in range(2):
                async with session.post(there, json=ask(), headers={RANK: "7"}) as got:
                    assert got.status == 200
        await runner.cleanup()

    asyncio.run(scenario())
    assert sorted(asked) == [["0"], ["1"]]


@pytest.mark.parametrize("ranks", [(None, None), (0, 0), (None, 1)])
def test_engines_of_one_address_are_told_apart(
    tmp_path: Path, ranks: tuple[int | None, ...]
) -> None:
    file = tmp_path / "instances.json"
    write_instances(file, engines(0, 1))
    assert read_instances(file) == engines(0, 1)
    with pytest.raises(ValueError, match="a `data_parallel_rank` of its own"):
        write_instances(file, engines(*ranks))
    alike = file.read_text().replace('"data_parallel_rank": 1', '"role": "both"')
    file.write_text(alike)
    with pytest.raises(InstancesError, match="a `data_parallel_rank` of its own"):
        read_instances(file)
