# SPDX-License-Identifier: Apache-2.0
"""The load generators that are compared, each told to send at a constant rate."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtax.fleet.trace import Request, write_trace
from kvtax.load.plan import Phase, Plan

OUTPUT_TOKENS = 8
VOCAB_SIZE = 32_000
BLOCK_TOKENS = 16

_VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Shape(NamedTuple):
    """Requests of one shape at a constant rate."""

    rate_rps: float
    prompt_tokens: int
    requests: int


class Generator(NamedTuple):
    """A load generator, started by `command(shape, url, folder)`.

    `cpu_ms` reads its CPU time per request from the folder, if it says.
    """

    name: str
    command: Callable[[Shape, str, Path], list[str]]
    end_line: str | None = None  # of the file whose last line has the CPU time
    cpu_field: str = ""

    def cpu_ms(self, folder: Path, requests: int) -> float | None:
        if self.end_line is None:
            return None
        last = (folder / self.end_line).read_bytes().splitlines()[-1]
        return msgspec.json.decode(last)[self.cpu_field] / requests * 1e3


def _replay(shape: Shape, url: str, folder: Path) -> list[str]:
    blocks = -(-shape.prompt_tokens // BLOCK_TOKENS)
    requests = (
        Request(
            arrival_s=number / shape.rate_rps,
            session=str(number),
            turn=0,
            input_tokens=shape.prompt_tokens,
            output_tokens=OUTPUT_TOKENS,
            hashes=list(range(number * blocks, (number + 1) * blocks)),
            block_tokens=BLOCK_TOKENS,
        )
        for number in range(shape.requests)
    )
    write_trace(folder / "trace.jsonl", {"requests": shape.requests}, requests)
    command = [sys.executable, "-m", "kvtax", "fleet", "replay", "--url", url]
    files = ["--trace", f"{folder}/trace.jsonl", "--out", f"{folder}/replay.jsonl"]
    return [*command, *files, "--lag-budget-ms", "1e6"]


def _driver(shape: Shape, url: str, folder: Path) -> list[str]:
    plan = Plan(
        model="null",
        vocab_size=VOCAB_SIZE,
        prompt_tokens=shape.prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        phases=[Phase("lag", shape.requests, shape.rate_rps)],
        lag_budget_ms=1e6,
    )
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    command = [sys.executable, "-m", "microbench.driver", url]
    return [*command, f"{folder}/plan.json", f"{folder}/out.jsonl"]


def _vllm_bench(shape: Shape, url: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", _VLLM_BENCH, "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", "null"]
    command += ["--tokenizer", str(_tokenizer(folder)), "--dataset-name", "random"]
    command += ["--random-input-len", str(shape.prompt_tokens)]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--disable-tqdm"]
    command += ["--num-prompts", str(shape.requests), "--ready-check-timeout-sec", "0"]
    # Gaps of a gamma distribution; with this shape they are constant.
    return [*command, "--request-rate", str(shape.rate_rps), "--burstiness", "1e9"]


def _aiperf(executable: str) -> Callable[[Shape, str, Path], list[str]]:
    def command(shape: Shape, url: str, folder: Path) -> list[str]:
        command = [executable, "profile", "-m", "null", "--url", url, "--streaming"]
        command += ["--endpoint-type", "completions"]
        command += ["--tokenizer", str(_tokenizer(folder))]
        command += ["--isl", str(shape.prompt_tokens), "--osl", str(OUTPUT_TOKENS)]
        command += ["--request-rate", str(shape.rate_rps), "--ui", "none"]
        command += ["--arrival-pattern", "constant", "--artifact-dir", str(folder)]
        return [*command, "--request-count", str(shape.requests)]

    return command


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer of made-up words, which the other generators need."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(1000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def generators(aiperf: str) -> tuple[list[Generator], list[str]]:
    """Return the installed generators, and a message for each missing one."""
    found = [
        Generator("kvtax.fleet.replay", _replay, "replay.jsonl", "replay_cpu_s"),
        Generator("microbench.driver", _driver, "out.jsonl", "driver_cpu_s"),
    ]
    missing = []
    if importlib.util.find_spec("vllm"):
        found.append(Generator("vllm bench serve", _vllm_bench))
    else:
        missing.append("vllm bench serve: vLLM is not installed here, left out")
    if executable := shutil.which(aiperf):
        found.append(Generator("aiperf", _aiperf(executable)))
    else:
        missing.append(f"aiperf: no {aiperf!r} to run (--aiperf PATH), left out")
    return found, missing
