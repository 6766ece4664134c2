# SPDX-License-Identifier: Apache-2.0
"""The proxy before a real vLLM: its cache state, clients, and token ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from fleet.tests.kvindexd.kvindexd_lab import needs_go
from fleet.tests.proxy.proxy_lab import free_port, post, proxy, until
from fleet.tests.proxy.tiny_model import tiny_model
from kvtax.engine.connector import Connector
from kvtax.engine.null_model import CPU_ENGINE, null_checkpoint
from kvtax.engine.server import SERVED_MODEL, Server, resolve
from kvtax.paths import REPOSITORY

from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.kvindexd import HASH_SEED, kvindexd
from kvtax_fleet.proxy.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from kvtax_fleet.records.instances import Instance

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SAID = [
    {"role": "system", "content": "Be brief. " * 40},
    {"role": "user", "content": "Which files are <|im_end|> there? é"},
]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "ls", "description": "Lists.", "parameters": SCHEMA}
CHATS: list[dict[str, Any]] = [
    {"messages": SAID},
    {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]},
]
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
AIPERF_LOCK = REPOSITORY / "locks" / "aiperf.txt"
MORE = {"model": SERVED_MODEL, "temperature": 0}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a <|im|>b c", "max_tokens": 4}),
    *((CHAT, {**chat, "max_tokens": 4}) for chat in CHATS),
    (
        MESSAGES,
        {
            "system": SAID[0]["content"],
            "messages": SAID[1:],
            "tools": [{"name": "ls", "input_schema": SCHEMA}],
            "max_tokens": 4,
        },
    ),
    (
        RESPONSES,
        {
            "instructions": SAID[0]["content"],
            "input": SAID[1:],
            "tools": [{"type": "function", "strict": True, **TOOL}],
            "max_output_tokens": 4,
        },
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def instance(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("server")
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args = [*CPU_ENGINE.server_args, "--no-skip-tokenizer-init", *tools]
    settings = msgspec.structs.replace(CPU_ENGINE, server_args=args)
    with Server(resolve(Connector("", []), settings, model, folder, {})) as server:
        server.wait_ready()
        yield Instance("a", server.url)


def test_the_clients_streams_end_well(instance, tmp_path):
    with proxy(tmp_path, [instance], "linear") as on:
        by = openai.OpenAI(base_url=f"{on.url}/v1", api_key="none", max_retries=0)
        asked = {"model": SERVED_MODEL, "extra_body": {"ignore_eos": True}}
        chat = by.chat.completions.create(
            messages=SAID,
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            **asked,
        )
        assert [*chat][-1].usage.completion_tokens == 4
        with by.responses.stream(
            input="What now?", max_output_tokens=4, **asked
        ) as stream:
            assert stream.get_final_response().usage.output_tokens == 4
        claude = anthropic.Anthropic(base_url=on.url, api_key="none", max_retries=0)
        with claude.messages.stream(
            model=SERVED_MODEL, messages=SAID[1:], max_tokens=4
        ) as stream:
            assert stream.get_final_message().usage.output_tokens > 0
        assert claude.messages.count_tokens(
            model=SERVED_MODEL, messages=SAID[1:]
        ).input_tokens
        on.idle()
        on.accounted(3)
        assert [end["status"] for end in on.lines("end")] == ["ok"] * 3


@pytest.mark.parametrize(
    ("backend", "path"), [("openai", COMPLETIONS), ("openai-chat", CHAT)]
)
def test_vllms_own_benchmark_gets_all_it_asks_for(
    instance, model, tmp_path, backend, path
):
    result = tmp_path / "bench.json"
    with proxy(tmp_path, [instance], "linear") as on:
        command = [sys.executable, "-c", BENCH, "--backend", backend]
        command += ["--base-url", on.url, "--endpoint", path, "--model", SERVED_MODEL]
        command += ["--tokenizer", str(model), "--dataset-name", "random"]
        command += ["--random-input-len", "200", "--random-output-len", "8"]
        command += ["--num-prompts", "40", "--request-rate", "40", "--ignore-eos"]
        command += ["--ready-check-timeout-sec", "0", "--disable-tqdm"]
        command += ["--temperature", "0", "--save-result"]
        command += ["--result-filename", str(result)]
        subprocess.run(command, check=True, timeout=300)
        said = json.loads(result.read_bytes())
        assert (said["completed"], said["failed"]) == (40, 0)
        assert said["total_output_tokens"] == 40 * 8
        on.idle()
        on.accounted(40)
        assert {end["status"] for end in on.lines("end")} == {"ok"}


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in an environment of its own: it wants other packages than vLLM."""
    place = tmp_path_factory.mktemp("aiperf") / "venv"
    uv = REPOSITORY / ".uv" / "bin" / "uv"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, place], check=True)
    python = ["--python", place / "bin" / "python", "--require-hashes"]
    subprocess.run([uv, "pip", "sync", "-q", *python, AIPERF_LOCK], check=True)
    return place / "bin" / "aiperf"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf_gets_all_it_asks_for(instance, model, aiperf, tmp_path, endpoint):
    with proxy(tmp_path, [instance], "linear") as on:
        command = [aiperf, "profile", "-m", SERVED_MODEL, "--url", on.url]
        command += ["--endpoint-type", endpoint, "--streaming"]
        command += ["--tokenizer", model, "--isl", "200", "--osl", "8"]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        command += ["--request-rate", "40", "--request-count", "40", "--ui", "none"]
        command += ["--artifact-dir", tmp_path / "aiperf"]
        subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
        (result,) = (tmp_path / "aiperf").rglob("profile_export_aiperf.json")
        said = json.loads(result.read_bytes())
        assert said["request_count"]["avg"] == 40
        assert said["output_sequence_length"]["min"] == 8
        on.idle()
        on.accounted(40)
        assert {end["status"] for end in on.lines("end")} == {"ok"}


def test_vllms_refusals_have_the_shape_of_the_api(instance, tmp_path):
    with proxy(tmp_path, [instance], "linear") as on:
        for path, asked in ASKED:
            answer = post(on.url, {**asked, "model": "other"}, path)
            assert answer.status == 404
            assert "other" in json.dumps(answer.json["error"])
            assert (answer.json.get("type") == "error") == (path == MESSAGES)


BLOCK, BLOCKS = 16, 120
# An engine step, and the publisher's look at its queue.
EVENTS_ARRIVE_S = 0.3


@pytest.fixture(params=[1, 2], ids=["one engine", "two engines"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Instance]]:
    """A null model with room for few prompts, so that blocks get evicted."""
    # vLLM adds an engine's rank, to ports only.
    port, replay_port = free_port(), free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{port}"}
    events |= {"replay_endpoint": f"tcp://*:{replay_port}"}
    settings = msgspec.structs.replace(
        CPU_ENGINE,
        data_parallel=request.param,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        server_args=[
            *CPU_ENGINE.server_args,
            "--enable-prompt-tokens-details",
            "--kv-events-config",
            json.dumps(events),
        ],
    )
    model = null_checkpoint(tmp_path / "model")
    spec = resolve(Connector("", []), settings, model, tmp_path, {})
    with Server(spec.with_options(PYTHONHASHSEED=HASH_SEED)) as server:
        server.wait_ready()
        yield [
            Instance(
                f"i{rank}",
                server.url,
                kv_events=f"tcp://127.0.0.1:{port + rank}",
                kv_events_replay=f"tcp://127.0.0.1:{replay_port + rank}",
                data_parallel_rank=rank,
            )
            for rank in range(request.param)
        ]


@needs_go
def test_exact_state_says_what_vllm_reuses(engines, tmp_path):
    random.seed(1)
    prompts: list[list[int]] = [[]]
    file = tmp_path / "instances.json"
    write_instances(file, engines)
    with (
        kvindexd(file, tmp_path / "kvindexd.log") as address,
        proxy(tmp_path, engines, "linear", "--kvindexd", address) as on,
    ):
        said, reused = [], []
        for number in range(40):
            begin = random.choice(prompts)[: random.randrange(1, 500)]
            more = random.choice([40, 400])
            prompt = begin + [random.randrange(1000) for _ in range(more)]
            prompts.append(prompt)
            asked = {"model": SERVED_MODEL, "prompt": prompt, "temperature": 0}
            asked |= {"max_tokens": random.choice([1, 40])}
            answer = post(on.url, asked, X_Request_Id=f"r/{number}")
            usage = answer.json["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            details = usage["prompt_tokens_details"] or {}
            reused.append(details.get("cached_tokens", 0))
            on.end(f"r/{number}")
            decision = on.lines("decision")[-1]
            candidates = decision["snapshot"]["candidates"]
            (chosen,) = [
                one for one in candidates if one["name"] == decision["instance"]
            ]
            said.append(chosen["cached_tokens"])
            time.sleep(EVENTS_ARRIVE_S)
        assert said == reused
        assert sum(reused) > 40 * BLOCK
        caches = [one["cache"] for one in on.instances().values()]
        for cache in caches:
            assert cache["complete"]
            assert cache["skipped_blocks"] == 0
            # The mirror knows of no eviction: the two must differ by now.
            assert cache["exact_tokens"] <= BLOCKS * BLOCK < cache["mirror_tokens"]
            assert cache["mean_difference_tokens"] > 0
        url = engines[0].url
        reset = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(reset).close()
        # vLLM publishes what has happened with its next step.
        asked = {"model": SERVED_MODEL, "prompt": [1], "max_tokens": 1}
        for one in engines:
            post(url, asked, X_data_parallel_rank=f"{one.data_parallel_rank}")
        until(
            lambda: (
                [one["cache"]["exact_tokens"] for one in on.instances().values()]
                == [0] * len(engines)
            ),
            "the reset did not arrive",
        )
