# SPDX-License-Identifier: Apache-2.0
"""Run N's arms below, at and beyond saturation, in virtual time, and write rates.csv.

N compares vLLM without a connector, with NIXL and with Mooncake's walk of all hashes,
on requests of 512 tokens with answers of 64. Here 1,280 of them arrive at random, 32,
64 and 128 a second on eight instances of an H20 as measured, with synchronous and with
asynchronous scheduling. Two minutes.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from kvtax_fleet.trace import Request, write_trace

from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.files import write_whole
from studies.harness import main
from tools import inputs

RATES_PER_S = (32, 64, 128)
SCHEDULING = ("sync", "async")
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 1_280, 512, 64, 16
ARMS = {
    "plain": "plain",
    "nixl": "nixl_both",
    "mooncake_walk": "mooncake_both_hash_sync",
}
EXPERIMENT = """\
summary = "N's arms at one rate"
profile = "h20-measured"
instances = 8
concurrency = [1000]
open_loop = true
repeats = 1
baseline = "plain"
request_timeout_s = 3600
virtual = {{ host = "two-cores", scheduling = "{scheduling}" }}
workload = {{ trace = "{trace}" }}
"""
LEVELS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))
QUANTILES = ("p50", "p90")
RATES = "studies/reference_study/rates.csv"
INPUTS = (
    "fleet/configs/profiles/h20-measured.toml",
    "fleet/configs/hosts/two-cores.json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no option: all rates run."""


def run(arguments: argparse.Namespace) -> int:
    """Run all rates and write the file. Returns the exit code. Raises RecordsError."""
    columns = [f"{name} {at}, ms" for name, _ in LEVELS for at in QUANTILES]
    lines = [",".join(["requests a second", "scheduling", "arm", *columns])]
    with tempfile.TemporaryDirectory() as folder:
        for rate in RATES_PER_S:
            for scheduling in SCHEDULING:
                lines += _lines(rate, scheduling, Path(folder, f"{rate}-{scheduling}"))
    text = "".join(f"{line}\n" for line in lines)
    write_whole(REPOSITORY / RATES, text.encode())
    print(text)
    inputs.note(RATES, [*INPUTS])
    return 0


def requests_at(rate_per_s: float) -> Iterator[Request]:
    """Yield requests that share nothing and arrive at random, alike in each call."""
    draw = random.Random(0)
    blocks = INPUT_TOKENS // BLOCK_TOKENS
    arrival_s = 0.0
    for number in range(REQUESTS):
        yield Request(
            arrival_s=arrival_s / rate_per_s,
            session=f"s{number}",
            turn=0,
            input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            hashes=list(range(number * blocks, (number + 1) * blocks)),
            block_tokens=BLOCK_TOKENS,
        )
        arrival_s += draw.expovariate(1.0)


def _lines(rate: int, scheduling: str, folder: Path) -> Iterator[str]:
    """Run one rate; yield a line for each arm. Raises RecordsError."""
    folder.mkdir()
    trace, config = folder / "trace.jsonl.xz", folder / "rates.toml"
    write_trace(trace, {"requests": REQUESTS}, requests_at(rate))
    arms = [
        f'[arms.{name}]\npolicy = "load_only"\nconnector = "{connector}"\n'
        for name, connector in ARMS.items()
    ]
    text = EXPERIMENT.format(scheduling=scheduling, trace=trace)
    config.write_text("\n".join([text, *arms]))
    command = [sys.executable, "-m", "kvtax", "fleet", str(config), "--virtual"]
    ended = subprocess.run([*command, "--out", str(folder / "run")], cwd=REPOSITORY)
    if ended.returncode:
        raise RecordsError(f"{' '.join(command)} ended with {ended.returncode}")
    document = msgspec.json.decode((folder / "run" / "analysis.json").read_bytes())
    for name in ARMS:
        (arm,) = [
            entry
            for label, entry in document["arms"].items()
            if label.startswith(f"{name}@")
        ]
        yield ",".join([str(rate), scheduling, name, *_levels(arm)])


def _levels(arm: Any) -> Iterator[str]:
    levels = arm["latency"]["all"]["all"]
    for _, metric in LEVELS:
        for at in QUANTILES:
            yield f"{levels[metric][at]['value']:.1f}"


if __name__ == "__main__":
    main("reference_study.rates", __doc__, configure, run)
