# SPDX-License-Identifier: Apache-2.0
"""Lateness of load generators against the constant rate that is requested.

All are measured the same way, by when their requests arrive at one server. Arrival i of
n is due i/rate after the first, whenever that was; the arrival that is earliest against
this schedule has lag 0. Generators and rates are interleaved over the repeats. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import urllib.request
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.senders_generators import Generator, Shape, generators
from kvtax.engine.supervise import Supervised
from kvtax.fleet.standin.process import standin
from kvtax.stats.markdown import DASH, table

SMALL_PROMPT_TOKENS = 16
LARGE_PROMPT_TOKENS, LARGE_RATE_RPS = 33_000, 15.0
TIMEOUT_S = 300.0


class Sample(NamedTuple):
    """One run: lag of each request, the rate it reached, CPU ms per request."""

    lag_ms: np.ndarray
    rate_rps: float
    cpu_ms: float | None


def measure(generator: Generator, shape: Shape, url: str) -> Sample | str:
    """Run it once. The text says why there is nothing to show, if so."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        _arrivals_ns(url)
        command = generator.command(shape, url, folder)
        with Supervised(command, dict(os.environ), log) as running:
            try:
                status = running.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return f"not done within {TIMEOUT_S:g} s"
        arrivals_ns = _arrivals_ns(url)[-shape.requests :]
        if status or len(arrivals_ns) < shape.requests:
            tail = log.read_text(errors="replace")[-300:].replace("\n", " ")
            return f"status {status}, {len(arrivals_ns)} requests: {tail}"
        cpu_ms = generator.cpu_ms(folder, shape.requests)
    schedule_ns = np.arange(shape.requests) * (1e9 / shape.rate_rps)
    behind_ns = np.sort(arrivals_ns) - schedule_ns
    span_s = (max(arrivals_ns) - min(arrivals_ns)) / 1e9
    rate_rps = (shape.requests - 1) / span_s
    return Sample((behind_ns - behind_ns.min()) / 1e6, rate_rps, cpu_ms)


def _arrivals_ns(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/arrivals") as response:
        return [arrived_ns for arrived_ns, _ in msgspec.json.decode(response.read())]


Samples = dict[tuple[str, Shape], list[Sample]]


def take_turns(
    found: list[Generator], shapes: list[Shape], repeats: int
) -> tuple[Samples, list[str]]:
    """All samples, and what to say of those that could not be taken."""
    samples: Samples = defaultdict(list)
    failed = []
    with standin("--at-once") as server:
        for _ in range(repeats):
            for shape, generator in product(shapes, found):
                sample = measure(generator, shape, server.url)
                if isinstance(sample, str):
                    failed.append(f"{generator.name} at {shape}: {sample}")
                else:
                    samples[generator.name, shape].append(sample)
    return samples, failed


def row(name: str, shape: Shape, samples: list[Sample]) -> list[str]:
    """Return a row of the table, over all requests of all repeats."""
    lag_ms = np.concatenate([sample.lag_ms for sample in samples])
    p50, p99 = np.percentile(lag_ms, [50, 99])
    rate_rps = np.mean([sample.rate_rps for sample in samples])
    cpu_ms = [sample.cpu_ms for sample in samples if sample.cpu_ms is not None]
    cells = [name, f"{shape.rate_rps:g}", f"{shape.prompt_tokens}", f"{len(lag_ms)}"]
    cells += [f"{p50:.2f}", f"{p99:.2f}", f"{lag_ms.max():.2f}", f"{rate_rps:.1f}"]
    return [*cells, f"{np.mean(cpu_ms):.2f}" if cpu_ms else DASH]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench senders`."""
    parser.add_argument("--rates", default="10,100,500,1000", help="req/s, by comma")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", help="generator; can be repeated")
    parser.add_argument("--aiperf", default="aiperf", help="its executable")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    found, missing = generators(arguments.aiperf)
    chosen = [g for g in found if arguments.only is None or g.name in arguments.only]
    rates = [(float(rate), SMALL_PROMPT_TOKENS) for rate in arguments.rates.split(",")]
    shapes = [
        Shape(rate, tokens, max(2, round(rate * arguments.seconds)))
        for rate, tokens in [*rates, (LARGE_RATE_RPS, LARGE_PROMPT_TOKENS)]
    ]
    samples, failed = take_turns(chosen, shapes, arguments.repeats)
    rows = [
        row(generator.name, shape, samples[generator.name, shape])
        for shape, generator in product(shapes, chosen)
        if samples[generator.name, shape]
    ]
    head = ["generator", "req/s", "prompt tokens", "n", "lag p50 ms", "p99", "max"]
    print(table([*head, "req/s reached", "CPU ms per request"], rows))
    for line in missing + failed:
        print(f"\n{line}")
    return 0
