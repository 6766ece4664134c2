# SPDX-License-Identifier: Apache-2.0
"""Each API through the proxy to a real vLLM: its clients, and the proxy's token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from proxy_lab import post, proxy
from tiny_model import ours, tiny_model

from fleet.proxy.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from fleet.proxy.tokenizer import Tokenizer
from lab.paths import REPOSITORY
from lab.records.instances import Instance
from lab.serving.connector import Connector
from lab.serving.installation import installation
from lab.serving.server import Server
from lab.serving.server_spec import SERVED_MODEL, Engine, resolve
from lab.serving.settings import CPU_ENGINE
from lab.serving.tree import build_tree

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
    build_tree(folder / "tree", installation().package("vllm"), [], {})
    engine = Engine(folder / "tree", settings, Connector("", []), model)
    with Server(resolve(engine, folder, {})) as server:
        server.wait_ready()
        yield Instance("a", server.url)


def test_ids_are_those_of_vllms_tokenize(instance: Instance, model: Path) -> None:
    own = Tokenizer(str(model))
    for path, asked in [(COMPLETIONS, ASKED[0][1]), *((CHAT, one) for one in CHATS)]:
        answer = post(instance.url, {**MORE, **asked}, "/tokenize")
        assert answer.json["tokens"] == ours(own, path, asked)


def test_every_prompt_is_as_long_as_vllm_says(
    instance: Instance, model: Path, tmp_path: Path
) -> None:
    options = ("--tokenizer", str(model))
    with proxy(tmp_path, [instance], "linear", *options) as on:
        for number, (path, asked) in enumerate(ASKED):
            answer = post(on.url, {**MORE, **asked}, path, X_Request_Id=f"{number}")
            assert answer.status == 200, answer.body
            usage = answer.json["usage"]
            on.end(f"{number}")
            told = usage.get("prompt_tokens", usage.get("input_tokens"))
            assert on.lines("decision")[-1]["prompt_tokens"] == told, path
        assert b"kvtax_proxy_untokenized_total{" not in on.get("/metrics").body


def test_the_clients_streams_end_well(instance: Instance, tmp_path: Path) -> None:
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
    instance: Instance, model: Path, tmp_path: Path, backend: str, path: str
) -> None:
    result = tmp_path / "bench.json"
    with proxy(tmp_path, [instance], "linear", "--tokenizer", str(model)) as on:
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
        told = sum(one["prompt_tokens"] for one in on.lines("decision"))
        assert b"kvtax_proxy_untokenized_total{" not in on.get("/metrics").body
        assert said["total_input_tokens"] <= told


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
def test_aiperf_gets_all_it_asks_for(
    instance: Instance, model: Path, aiperf: Path, tmp_path: Path, endpoint: str
) -> None:
    with proxy(tmp_path, [instance], "linear", "--tokenizer", str(model)) as on:
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
        assert b"kvtax_proxy_untokenized_total{" not in on.get("/metrics").body


def test_vllms_refusals_have_the_shape_of_the_api(
    instance: Instance, tmp_path: Path
) -> None:
    with proxy(tmp_path, [instance], "linear") as on:
        for path, asked in ASKED:
            answer = post(on.url, {**asked, "model": "other"}, path)
            assert answer.status == 404
            assert "other" in json.dumps(answer.json["error"])
            assert (answer.json.get("type") == "error") == (path == MESSAGES)
