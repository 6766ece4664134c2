# SPDX-License-Identifier: Apache-2.0
"""How late the driver sends, and what it costs: measured against a trivial server.

Prints a Markdown table. Loads are interleaved over the repeats, so that a noisy minute
of the machine does not land on one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from microbench.driver.plan import Phase, Plan
from microbench.supervise import exit_on_signals

VOCAB_SIZE = 32_000
OUTPUT_TOKENS = 8
SMALL_PROMPT_TOKENS = 16
LARGE_PROMPT_TOKENS, LARGE_RATE_RPS = 33_000, 15.0


class Load(NamedTuple):
    """Requests of one shape at a constant rate."""

    rate_rps: float
    prompt_tokens: int


class Sample(NamedTuple):
    """One run of the driver: the lag of each request sent, and its end line."""

    lag_ms: list[float]
    end: dict


@contextlib.contextmanager
def trivial_server() -> Iterator[str]:
    """The URL of a fresh server, which ends with the block or with this process."""
    with subprocess.Popen(
        [sys.executable, "-m", "microbench.trivial_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def measure(load: Load, seconds: float, url: str, folder: Path) -> Sample:
    """Run the driver once. Raises RuntimeError if a request did not end well."""
    plan = Plan(
        model="null",
        vocab_size=VOCAB_SIZE,
        prompt_tokens=load.prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        phases=[Phase("lag", max(1, round(load.rate_rps * seconds)), load.rate_rps)],
    )
    plan_file, out = folder / "plan.json", folder / "requests.jsonl"
    plan_file.write_bytes(msgspec.json.encode(plan))
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "microbench.driver", "--url", url]
    run_driver([*command, "--plan", str(plan_file), "--out", str(out)])
    *lines, end = map(msgspec.json.decode, out.read_bytes().splitlines())
    if end["ok"] < end["scheduled"]:
        raise RuntimeError(f"{load}: {end['failed']} of {end['scheduled']} failed")
    requests = [line for line in lines if line.get("type") == "request"]
    lag_ms = [(line["sent_ns"] - line["intended_ns"]) / 1e6 for line in requests]
    return Sample(lag_ms, end)


def run_driver(command: list[str]) -> None:
    """Run to the end; stop the driver where this process is stopped."""
    with subprocess.Popen(command) as driver:
        try:
            driver.wait()
        finally:
            driver.terminate()


def row(load: Load, samples: list[Sample]) -> str:
    """One line of the table, over all requests of all repeats."""
    lag_ms = np.concatenate([sample.lag_ms for sample in samples])
    p50, p90, p99 = np.percentile(lag_ms, [50, 90, 99])
    cpu_ms = sum(sample.end["driver_cpu_s"] for sample in samples) / len(lag_ms) * 1e3
    valid = sum(sample.end["valid"] for sample in samples)
    return (
        f"| {load.rate_rps:g} | {load.prompt_tokens} | {len(lag_ms)} | {p50:.2f} | "
        f"{p90:.2f} | {p99:.2f} | {max(lag_ms):.2f} | {cpu_ms:.2f} | "
        f"{valid}/{len(samples)} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        "python -m microbench.driver_lag", description=__doc__
    )
    parser.add_argument("--rates", default="10,100,1000", help="requests/s, by comma")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",")]
    loads = [Load(rate, SMALL_PROMPT_TOKENS) for rate in rates]
    loads.append(Load(LARGE_RATE_RPS, LARGE_PROMPT_TOKENS))
    exit_on_signals()

    samples: dict[Load, list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, trivial_server() as url:
        for _ in range(arguments.repeats):
            for load in loads:
                sample = measure(load, arguments.seconds, url, Path(folder))
                samples[load].append(sample)

    print("| req/s | prompt tokens | n | lag p50 ms | p90 | p99 | max ", end="")
    print("| CPU ms a request | valid |")
    print("|---:" * 9 + "|")
    for load in loads:
        print(row(load, samples[load]))


if __name__ == "__main__":
    main()
