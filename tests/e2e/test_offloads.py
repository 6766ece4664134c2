# SPDX-License-Identifier: Apache-2.0
"""A prompt that elastic prefills elsewhere is answered as by a single instance.

Real weights, KV over Mooncake or NIXL, launcher and proxy as an experiment uses them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.offloads import ENGINE_PHASES as PHASES
from kvtax_fleet.analyze.offloads import engine_phases
from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.launch.launched import LaunchedInstance, Workshop, launched, wait_ready
from kvtax_fleet.launch.spec import FleetSpec
from kvtax_fleet.records.arm import ArmRecord
from kvtax_fleet.records.decisions import (
    DecisionEnd,
    DecisionRecord,
    DecisionsHeader,
    Offload,
)

from kvtax.engine.connector import load_connector
from kvtax.engine.server import SERVED_MODEL, http_ok
from kvtax.paths import CONFIGS
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import Supervised
from kvtax.records.files import read_lines
from tests.harness.tiny.checkpoint import MAX_TOKENS, prompt
from tests.harness.tiny.server import ANSWER_TOKENS, BLOCK_TOKENS, NUM_BLOCKS, Tokens
from tests.harness.tiny.servers import Reference, TinyServers

pytestmark = [pytest.mark.e2e, pytest.mark.long]

HEAVY_TOKENS = 64


@dataclass(frozen=True)
class Elastic:
    fleet: list[LaunchedInstance]
    proxy_url: str
    folder: Path


@pytest.fixture(scope="module", params=["mooncake_both_fixed", "nixl_both"])
def elastic(lab: TinyServers, request: pytest.FixtureRequest) -> Iterator[Elastic]:
    connector = request.param
    folder = lab.folder / connector
    folder.mkdir()
    simulated = read_instance_settings(CONFIGS / "fleet" / "h20-30b-a3b.toml")
    settings = msgspec.structs.replace(
        simulated,
        forward=None,
        model=str(lab.checkpoint),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        server_args=["--enforce-eager", "--dtype", "float32"],
    )
    spec = FleetSpec(settings, connector, load_connector(connector), ["both", "both"])
    instances = folder / "instances"
    instances.mkdir()
    with (
        Workshop(folder / "workshop") as workshop,
        launched(spec, workshop, instances) as fleet,
    ):
        wait_ready(fleet)
        file, port = folder / "instances.json", reserve(1)[0].http
        write_instances(file, [each.instance for each in fleet])
        with Supervised(proxy(file, port), dict(os.environ), folder / "log"):
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 30
            while not http_ok(f"{url}/health"):
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            yield Elastic(fleet, url, folder)


def proxy(file: Path, port: int) -> list[str]:
    limits = [f"warm_tokens={BLOCK_TOKENS}", f"heavy_tokens={HEAVY_TOKENS}"]
    command = [sys.executable, "-m", "kvtax", "proxy", "--instances", str(file)]
    command += ["--policy", "elastic", "--port", str(port)]
    command += ["--log", str(file.with_name("decisions.jsonl"))]
    return [*command, "--parameters", *limits]


async def ask(url: str, tokens: Tokens, name: str = "any") -> tuple[Tokens, str | None]:
    """The answer's tokens, and where the prompt was prefilled if not where decoded."""
    headers = {"X-Request-Id": name}
    body = {
        "model": SERVED_MODEL,
        "prompt": tokens,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        answer = await response.json()
        prefilled = response.headers.get("X-Kvtax-Prefill")
        return answer["choices"][0]["token_ids"], prefilled


async def pulled_tokens(elastic: Elastic) -> int:
    """Prompt tokens whose KV came from a peer, in all instances."""
    wanted = "vllm:prompt_tokens_by_source_total{"
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for each in elastic.fleet:
            async with session.get(f"{each.instance.url}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if line.startswith(wanted) and "external_kv_transfer" in line:
                        total += float(line.rpartition(" ")[2])
    return int(total)


async def test_an_offloaded_answer_is_a_single_instances(
    elastic: Elastic, reference: Reference
):
    heavy = [prompt(seed, tokens) for seed, tokens in enumerate((65, 200, 1000, 4001))]
    for tokens, expected in zip(heavy, await reference.tokens(heavy), strict=True):
        before = await pulled_tokens(elastic)
        answered, prefilled = await ask(elastic.proxy_url, tokens)
        assert answered == expected
        assert prefilled is not None
        pulled = await pulled_tokens(elastic) - before
        # In both cases D computes what is not a whole block.
        assert pulled >= len(tokens) - BLOCK_TOKENS


async def test_a_light_prompt_stays_and_is_answered_as_well(
    elastic: Elastic, reference: Reference
):
    light = prompt(50, HEAVY_TOKENS - 4)
    (expected,) = await reference.tokens([light])
    answered, prefilled = await ask(elastic.proxy_url, light)
    assert answered == expected
    assert prefilled is None


def test_both_engines_tell_the_phases_of_an_offload(elastic: Elastic):
    """They lie within what the proxy saw, one after the other."""
    lengths = (1000, 4002)
    for tokens in lengths:
        name = f"phases/{tokens}"
        asyncio.run(ask(elastic.proxy_url, prompt(tokens, tokens), name))
    told: dict[str, tuple[Offload, dict]] = {}
    deadline = time.monotonic() + 30
    while len(told) < len(lengths):
        assert time.monotonic() < deadline, told
        time.sleep(0.5)
        told = {name: one for name, one in phases(elastic).items() if "phases" in name}
    for offload, engines in told.values():
        seen = offload.phases_s()
        in_engines_s = sum(engines[phase] for phase in PHASES) / 1e3
        assert 0 < engines["p_prefill"] / 1e3 < seen["prefill"]
        assert engines["transfer"] > 0
        assert 0 < engines["first_token"] / 1e3 < seen["total"]
        assert in_engines_s < seen["total"]
        # What is left is HTTP, tokenizing and waiting for a step of the engine to end.
        assert seen["total"] - in_engines_s < 2


def phases(elastic: Elastic) -> dict[str, tuple[Offload, dict]]:
    """By request: what the proxy saw, and the engines."""
    log = read_lines(
        elastic.folder / "decisions.jsonl",
        DecisionsHeader,
        DecisionRecord | DecisionEnd,
    )
    ends = [line for line in log.records if isinstance(line, DecisionEnd)]
    info = ArmRecord(arm="elastic", repeat=0, status="ok")
    run = ArmRun(elastic.folder, info, [], None, [], ends, {}, 0)
    seen = {end.id: end.offload for end in ends}
    return {row["id"]: (seen[row["id"]], row) for row in engine_phases(run)}
