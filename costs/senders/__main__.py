# SPDX-License-Identifier: Apache-2.0
"""How late load generators send, all measured the same way: by when their requests
arrive at one server, against the constant rate they were told.

Arrival i of n is due i/rate after the first, whenever that was; the arrival that is
earliest against this schedule has lag 0. Prints a Markdown table. Generators and loads
are interleaved over the repeats. Run it with `python -m costs.senders.bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from costs.senders.generators import Generator, Load, generators
from lab.serving.supervise import Supervised, exit_on_signals

SMALL_PROMPT_TOKENS = 16
LARGE_PROMPT_TOKENS, LARGE_RATE_RPS = 33_000, 15.0
TIMEOUT_S = 300.0


class Sample(NamedTuple):
    """One run: the lag of each request, the rate it came to, CPU ms a request."""

    lag_ms: np.ndarray
    rate_rps: float
    cpu_ms: float | None


@contextlib.contextmanager
def bench_server() -> Iterator[str]:
    """The URL of a fresh server, which ends with the block or with this process."""
    with subprocess.Popen(
        [sys.executable, "-m", "costs.senders.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def measure(generator: Generator, load: Load, url: str) -> Sample | str:
    """Run it once; a text says why there is nothing to show."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        _arrivals_ns(url)
        command = generator.command(load, url, folder)
        with Supervised(command, dict(os.environ), log) as running:
            try:
                status = running.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return f"not done within {TIMEOUT_S:g} s"
        arrivals_ns = _arrivals_ns(url)[-load.requests :]
        if status or len(arrivals_ns) < load.requests:
            tail = log.read_text(errors="replace")[-300:].replace("\n", " ")
            return f"status {status}, {len(arrivals_ns)} requests: {tail}"
        cpu_ms = generator.cpu_ms(folder, load.requests)
    schedule_ns = np.arange(load.requests) * (1e9 / load.rate_rps)
    behind_ns = np.sort(arrivals_ns) - schedule_ns
    span_s = (max(arrivals_ns) - min(arrivals_ns)) / 1e9
    rate_rps = (load.requests - 1) / span_s
    return Sample((behind_ns - behind_ns.min()) / 1e6, rate_rps, cpu_ms)


def _arrivals_ns(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/arrivals") as response:
        return msgspec.json.decode(response.read(), type=list[int])


def row(name: str, load: Load, samples: list[Sample]) -> str:
    """One line of the table, over all requests of all repeats."""
    lag_ms = np.concatenate([sample.lag_ms for sample in samples])
    p50, p99 = np.percentile(lag_ms, [50, 99])
    rate_rps = np.mean([sample.rate_rps for sample in samples])
    cpu_ms = [sample.cpu_ms for sample in samples if sample.cpu_ms is not None]
    cpu = f"{np.mean(cpu_ms):.2f}" if cpu_ms else "-"
    return (
        f"| {name} | {load.rate_rps:g} | {load.prompt_tokens} | {len(lag_ms)} | "
        f"{p50:.2f} | {p99:.2f} | {lag_ms.max():.2f} | {rate_rps:.1f} | {cpu} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        "python -m costs.senders.bench", description=__doc__
    )
    parser.add_argument("--rates", default="10,100,500,1000", help="req/s, by comma")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", help="generator; can be repeated")
    parser.add_argument("--aiperf", default="aiperf", help="its executable")
    arguments = parser.parse_args()
    exit_on_signals()
    found, missing = generators(arguments.aiperf)
    chosen = [g for g in found if arguments.only is None or g.name in arguments.only]
    shapes = [(float(rate), SMALL_PROMPT_TOKENS) for rate in arguments.rates.split(",")]
    shapes.append((LARGE_RATE_RPS, LARGE_PROMPT_TOKENS))
    loads = [
        Load(rate, tokens, max(2, round(rate * arguments.seconds)))
        for rate, tokens in shapes
    ]
    samples: dict[tuple[str, Load], list[Sample]] = defaultdict(list)
    with bench_server() as url:
        for _ in range(arguments.repeats):
            for load in loads:
                for generator in chosen:
                    sample = measure(generator, load, url)
                    if isinstance(sample, str):
                        missing.append(f"{generator.name} at {load}: {sample}")
                    else:
                        samples[generator.name, load].append(sample)
    print("| generator | req/s | prompt tokens | n | lag p50 ms | p99 | max ", end="")
    print("| req/s reached | CPU ms a request |")
    print("|---" + "|---:" * 8 + "|")
    for load in loads:
        for generator in chosen:
            if samples[generator.name, load]:
                print(row(generator.name, load, samples[generator.name, load]))
    for line in missing:
        print(f"\n{line}")


if __name__ == "__main__":
    main()
