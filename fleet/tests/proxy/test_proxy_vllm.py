# SPDX-License-Identifier: Apache-2.0
"""The proxy before a real vLLM: clients of its two APIs get all that they ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest
from fleet.tests.proxy.proxy_lab import proxy
from fleet.tests.proxy.tiny_model import tiny_model
from kvtax.engine.connector import Connector
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.server import SERVED_MODEL, Server, resolve

from kvtax_fleet.proxy.apis import CHAT, COMPLETIONS
from kvtax_fleet.records.instances import Instance

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SAID = [
    {"role": "system", "content": "Be brief. " * 40},
    {"role": "user", "content": "Which files are <|im_end|> there? é"},
]
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


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
        on.idle()
        on.accounted(1)
        assert [end["status"] for end in on.lines("end")] == ["ok"]


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
