# SPDX-License-Identifier: Apache-2.0
"""Two real servers record their own traffic, and `look` says what it cost whom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import polars as pl
import pytest
from kvtax_fleet.trace import Request, write_trace

from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import SERVED_MODEL
from kvtax.look.clients import on_the_way_us, read_clients
from kvtax.look.discover import discover
from kvtax.look.instances import Instance, read_instance
from kvtax.look.requests import TIMED_PARTS, WAITS
from kvtax.patcher import load_sets
from kvtax.paths import PATCHES, REPOSITORY
from tests.e2e.test_transfers import pull_params, send_params
from tests.harness.tiny import (
    KV_TRANSFER,
    NEEDED,
    VOCAB_SIZE,
    TinyServer,
    TinyServers,
    prompt,
    ready,
)

from .doors import await_written

pytestmark = pytest.mark.e2e

PULLED, LOCAL = 6, 12
DRIVEN, SESSIONS, TURNS = 20, 5, 2
PROMPT_TOKENS = 600
# Median of what a load generator waits for besides the engine: HTTP, tokens to text.
OUTSIDE_THE_ENGINE_MS = 400.0


@dataclass
class Served:
    """What the clients saw in ms, by the id that they gave, and what was recorded."""

    client_ms: dict[str, float]
    instances: dict[str, Instance]
    printed: str
    page: str


async def ask(
    server: TinyServer, request_id: str, tokens: list[int], count: int, params: dict
) -> float:
    """ms until the whole answer was there."""
    body = {
        "model": SERVED_MODEL,
        "prompt": tokens,
        "max_tokens": count,
        "ignore_eos": True,
    }
    body |= {"kv_transfer_params": params} if params else {}
    began_s = time.monotonic()
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": request_id}) as session,
        session.post(f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        await response.json()
    return (time.monotonic() - began_s) * 1e3


async def serve(p: TinyServer, d: TinyServer) -> dict[str, float]:
    """Prompts that D pulls from P, and others that it computes."""
    client_ms = {}

    async def pulled(number: int) -> None:
        name, tokens = f"pulled{number}", prompt(number, PROMPT_TOKENS)
        pull = await pull_params(p, name)
        client_ms[name], _ = await asyncio.gather(
            ask(d, name, tokens, 16, pull), ask(p, name, tokens, 1, send_params(name))
        )

    async def local(number: int) -> None:
        await asyncio.sleep(0.05 * number)
        name, tokens = f"local{number}", prompt(100 + number, 50)
        client_ms[name] = await ask(d, name, tokens, 32, {})

    await asyncio.gather(*map(pulled, range(PULLED)), *map(local, range(LOCAL)))
    return client_ms


def drive(server: TinyServer, folder: Path) -> None:
    """The load driver's requests; what it saw goes to `folder`."""
    plan = {
        "model": SERVED_MODEL,
        "vocab_size": VOCAB_SIZE,
        "prompt_tokens": 100,
        "output_tokens": 8,
        "lag_budget_ms": 10_000,
        "phases": [{"name": "growth", "requests": DRIVEN, "rate_rps": 10}],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    sent_by = ["microbench.driver", server.url, str(folder / "plan.json")]
    run(*sent_by, str(folder / "requests.jsonl"), str(os.getpid()))


def replay(server: TinyServer, folder: Path) -> None:
    """The replayer's, with names that a header cannot hold as they are."""
    requests = [
        Request(
            arrival_s=session / 10,
            session=f"Sitzung é, 100 % {session}",
            turn=turn,
            input_tokens=160 * (turn + 1),
            output_tokens=8,
            hashes=[100 * session + block for block in range(10 * (turn + 1))],
            block_tokens=16,
            think_s=0.1 if turn else None,
        )
        for session in range(SESSIONS)
        for turn in range(TURNS)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    write_trace(folder / "trace.jsonl", {"requests": len(requests)}, requests)
    sent_by = ["kvtax", "fleet", "replay", "--trace", str(folder / "trace.jsonl")]
    sent_by += ["--vocab-size", str(VOCAB_SIZE), "--lag-budget-ms", "10000"]
    run(*sent_by, "--url", server.url, "--out", str(folder / "replay.jsonl"))


def run(module: str, *arguments: str) -> str:
    """What `python -m module` prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(lab: TinyServers, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp("look")
    overlay = folder / "overlay"
    patches = [*NEEDED, *load_sets(PATCHES)["timing"]]
    build_overlay(overlay, patches, {"DELAY_US": 500}, lab.installed)
    records = folder / "records"

    def instance(name: str, ids: str) -> TinyServer:
        (records / name).mkdir(parents=True)
        return TinyServer(
            folder / name,
            overlay,
            lab.checkpoint,
            KV_TRANSFER["mooncake"] | {"kv_role": "kv_both"},
            {"KVTAX_STEP_RECORDS_DIR": str(records / name), "KVTAX_REQUEST_IDS": ids},
            32,
            lab.installed,
            lab.block_tokens,
        )

    clients = records / "clients"
    clients.mkdir(parents=True)
    with ready(instance("p", "hashed"), instance("d", "plain")) as (p, d):
        client_ms = asyncio.run(serve(p, d))
        drive(p, clients)
        replay(d, clients)
        # Records reach the files while the servers run, too.
        await_written(records / "p", PULLED + DRIVEN)
        await_written(records / "d", PULLED + LOCAL + SESSIONS * TURNS)
        page = folder / "report.html"
        ended = run("kvtax", "look", str(records), "--out", str(page))
        discovered, warnings = discover(records)
        joined = read_clients(records, discovered)
        instances = {
            source.name.partition("/")[0]: joined.joined(read_instance(source))
            for source in discovered
        }
    assert warnings == joined.warnings == []
    return Served(client_ms, instances, ended, page.read_text())


def of_client(served: Served, name: str) -> pl.DataFrame:
    """The requests at D whose ids clients gave as `name` and a number."""
    requests = served.instances["d"].requests
    return requests.filter(pl.col("id").str.contains(f"^cmpl-{name}\\d+-0$"))


def test_each_client_finds_its_request_by_its_own_id(served):
    assert of_client(served, "pulled").height == PULLED
    assert of_client(served, "local").height == LOCAL


def test_the_engine_s_time_is_what_the_client_waited_less_what_is_outside(served):
    asked = pl.concat([of_client(served, "pulled"), of_client(served, "local")])
    shares_outside = []
    for row in asked.iter_rows(named=True):
        client_ms = served.client_ms[row["id"].removeprefix("cmpl-")[:-2]]
        engine_ms = (row["before_engine_us"] + row["e2e_us"]) / 1e3
        shares_outside.append(1 - engine_ms / client_ms)
    assert min(shares_outside) > 0
    # Clients and servers share the cores: what waits for one waits outside the engine.
    assert statistics.quantiles(shares_outside)[0] < 0.5


@pytest.mark.parametrize(("name", "sent"), [("p", DRIVEN), ("d", SESSIONS * TURNS)])
def test_what_a_load_generator_saw_is_joined_to_what_its_engine_did(served, name, sent):
    """P's ids are hashed, D's are plain, and are those that vLLM made of the header."""
    answered = served.instances[name].requests.drop_nulls("client_e2e_us")
    assert answered.height == sent
    for span in ("ttft", "e2e"):
        on_the_way_ms = answered.select(on_the_way_us(span) / 1e3).to_series()
        assert on_the_way_ms.min() > 0
        assert on_the_way_ms.median() < OUTSIDE_THE_ENGINE_MS
    assert "clients waited, ms" in served.page


def test_a_pulled_prompt_waited_for_kv_and_a_local_one_did_not(served):
    pulled, local = of_client(served, "pulled"), of_client(served, "local")
    assert pulled["external_tokens"].min() >= PROMPT_TOKENS - 32
    assert pulled["e2e.kv_wait_us"].min() > 0
    assert local["external_tokens"].max() == 0
    assert local["e2e.kv_wait_us"].max() == 0


def test_the_parts_of_each_request_add_up(served):
    for instance in served.instances.values():
        for span in ("ttft", "e2e"):
            parts = [f"{span}.{part}" for part in (*WAITS, *TIMED_PARTS, "other_us")]
            total = instance.requests.select(pl.sum_horizontal(parts)).to_series()
            assert (total - instance.requests[f"{span}_us"]).abs().max() < 0.01
            for part in parts:
                # A step is rounded to float32, here and there.
                assert instance.requests[part].min() > -100, part


def test_the_table_and_the_page_name_what_the_connector_took(served):
    for name in ("d", "p"):
        assert re.search(rf"\b{name}/\S+: vLLM ", served.printed)
    assert "worker.get_finished" in served.printed
    assert "The connector's share of what users wait for" in served.page
    assert "cmpl-pulled0-0" in served.page
    assert "Warnings" not in served.printed
