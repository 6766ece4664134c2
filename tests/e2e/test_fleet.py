# SPDX-License-Identifier: Apache-2.0
"""A fleet of real vLLM: started by one command, in order, and gone with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import pytest
from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.offloads import ENGINE_PHASES as PHASES
from kvtax_fleet.analyze.offloads import engine_phases
from kvtax_fleet.instances import read_instances, write_instances
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.launch.launched import LaunchedInstance, Workshop, launched, wait_ready
from kvtax_fleet.launch.launched import launched as launched_fleet
from kvtax_fleet.launch.spec import FleetSpec
from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.arm import ArmRecord
from kvtax_fleet.records.decisions import (
    DecisionEnd,
    DecisionRecord,
    DecisionsHeader,
    Offload,
)
from kvtax_fleet.records.exposition import cache_config
from kvtax_fleet.records.instances import Instance

from kvtax.engine.connector import load_connector
from kvtax.engine.server import READY_DEADLINE_S, SERVED_MODEL, http_ok
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import Supervised, descendants
from kvtax.records.files import read_lines
from kvtax.records.steps import only_life
from tests.e2e import doors
from tests.harness.tiny import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    MAX_TOKENS,
    NUM_BLOCKS,
    Reference,
    TinyServers,
    Tokens,
    prompt,
)
from tests.proc.living import gone

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROFILE = CONFIGS / "profiles" / "h20-30b-a3b.toml"
LAUNCH = [sys.executable, "-m", "kvtax", "fleet", "launch"]
STOP_DEADLINE_S = 40.0
PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """(the process, its folder) of two instances."""
    folder = tmp_path_factory.mktemp("fleet")
    secret = f'kv_connector_extra_config = {{ password = "{PASSWORD}" }}, kv_buffer'
    profile = folder / "profile.toml"
    profile.write_text(PROFILE.read_text().replace("kv_buffer", secret, 1))
    options = ["--instances", "2", "--connector", "noop"]
    options += ["--profile", str(profile), "--folder", str(folder)]
    with (
        (folder / "launch.log").open("w") as log,
        subprocess.Popen(
            [*LAUNCH, *options], cwd=REPOSITORY, stdout=log, stderr=log
        ) as process,
    ):
        try:
            deadline = time.monotonic() + READY_DEADLINE_S
            while not (folder / "instances.json").exists():
                said = (folder / "launch.log").read_text()
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.2)
            yield process, folder
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def instances(fleet) -> list[Instance]:
    return read_instances(fleet[1] / "instances.json")


def complete(instance: Instance, prompt: list[int]) -> dict:
    body = {"model": SERVED_MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{instance.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_password_of_the_connector_is_in_no_command_line_or_log(fleet):
    process, folder = fleet
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)
    ]
    assert sum(b"api_server" in command for command in commands) >= 2
    assert not any(PASSWORD.encode() in command for command in commands)
    for name in ("i0", "i1"):
        text = (folder / name / "server.log").read_text()
        # vLLM names it there, up to 0.28.
        assert "kv_transfer_config" in text and PASSWORD not in text


def test_a_prompt_takes_the_simulated_time_and_the_next_finds_it_cached(
    fleet, instances
):
    forward = read_instance_settings(PROFILE).forward
    tokens = 2_000
    prompt = [token % 1000 for token in range(tokens)]
    _, folder = fleet
    for instance in instances:
        totals = folder / instance.name / "forward_totals"
        _, before_ns, _ = np.fromfile(totals, np.int64)
        began = time.perf_counter()
        first = complete(instance, prompt)
        took_s = time.perf_counter() - began
        _, after_ns, slept_ns = np.fromfile(totals, np.int64)
        expected_us = (
            forward.forward_us
            + forward.us_per_token * tokens
            + forward.us_per_context_token * tokens * (tokens - 1) / 2
        )
        assert after_ns - before_ns == pytest.approx(expected_us * 1e3, rel=1e-3)
        assert took_s > expected_us / 1e6
        assert slept_ns >= after_ns
        assert not (first["usage"].get("prompt_tokens_details") or {}).get(
            "cached_tokens"
        )
        again = complete(instance, prompt)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_900


def test_ctrl_c_leaves_nothing(fleet, instances):
    """Last: it ends the fleet."""
    process, folder = fleet
    below = descendants(process.pid)
    assert len(below) > 4
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_DEADLINE_S) == 128 + signal.SIGINT
    assert gone(below)
    assert not (folder / "instances.json").exists()
    assert not (folder / "workshop").exists()
    for instance in instances:
        with socket.socket() as probe:
            # As servers do: a connection that has only just ended is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", urlsplit(instance.url).port))


def steps(file: Path) -> list[int]:
    lines = file.read_text().splitlines()[1:]
    return [json.loads(line)["step_id"] for line in lines]


def test_both_workers_record_every_step_and_one_counts_its_time(tmp_path):
    settings = msgspec.structs.replace(
        read_instance_settings(PROFILE), tensor_parallel=2, num_blocks=None
    )
    spec = FleetSpec(settings, "noop", load_connector("noop"))
    with (
        Workshop(tmp_path / "workshop") as workshop,
        launched_fleet(spec, workshop, tmp_path) as (entry,),
    ):
        wait_ready([entry])
        doors.complete(entry.instance.url, 0)
        with urllib.request.urlopen(f"{entry.instance.url}/metrics") as response:
            printed = cache_config(response.read().decode())
        forwards, simulated_ns, slept_ns = np.fromfile(entry.forward_totals, np.int64)
    assert printed["num_gpu_blocks"] > 1_000
    life = only_life(entry.folder)
    by_rank = [steps(life / f"worker_step.r{rank}.jsonl") for rank in (0, 1)]
    of_engine = steps(life / "engine_step.jsonl")
    assert by_rank == [of_engine, of_engine]
    # Both together would count twice as many; vLLM's warming up is one, too.
    assert 8 <= forwards < 2 * 8
    assert slept_ns >= simulated_ns > 8 * settings.forward.forward_us * 1e3


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
    simulated = read_instance_settings(PROFILE)
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
    printed: dict[str, tuple[Offload, dict]] = {}
    deadline = time.monotonic() + 30
    while len(printed) < len(lengths):
        assert time.monotonic() < deadline, printed
        time.sleep(0.5)
        printed = {
            name: entry for name, entry in phases(elastic).items() if "phases" in name
        }
    for offload, engines in printed.values():
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
