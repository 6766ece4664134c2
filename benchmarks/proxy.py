# SPDX-License-Identifier: Apache-2.0
"""The proxy's addition to the time to first token, and its throughput per core.

It needs Go, for a load generator and a server that are faster than any proxy between
them (proxy_load/), and two cores: the router has one, they share the other. Each round
measures every target with every body, in an order that turns around from round to
round. A target's figure is over all rounds, its 95 % interval from a bootstrap of
rounds. Without --vllm-router that router is left out, and the output says so. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.proxy_parts import body_table, decisions_table
from benchmarks.proxy_targets import (
    BODIES,
    LOAD_CORE,
    RATE_RPS,
    WORKERS,
    LoadGenerator,
    Target,
    build_load_program,
    kvtax_proxy,
    process,
    stack,
    vllm_router,
)
from benchmarks.results import NotMeasured
from kvtax.stats import Estimate
from kvtax.stats.markdown import table
from kvtax.stats.resampling import over_rounds

DECISIONS, BODY_READS = 20_000, 300


def take_turns(
    targets: dict[str, Target], rounds: int, one: Callable[[Target, str], list[float]]
) -> Samples:
    """`one` of each target and body, once per round."""
    samples: Samples = defaultdict(list)
    for number in range(rounds):
        names = list(targets) if number % 2 == 0 else list(targets)[::-1]
        for body in BODIES:
            for name in names:
                samples[name, body].append(one(targets[name], body))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return samples


def measure(
    router: str | None, rounds: int, seconds: float
) -> tuple[list[str], Samples, Samples]:
    """Targets, times in ms, and what LoadGenerator.per_s says. Raises NotMeasured."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        program = build_load_program(folder)
        served = ends.enter_context(process(LOAD_CORE, str(program), "serve"))
        server = served.stdout.readline().strip()
        targets = {DIRECT: Target(server)}
        proxy = kvtax_proxy(server, folder / "proxy.jsonl")
        targets["kvtax.fleet.proxy"] = ends.enter_context(proxy)
        for name, serve in STACKS.items():
            targets[name] = ends.enter_context(stack(serve, server))
        if router:
            targets["vllm-router"] = ends.enter_context(vllm_router(server, router))
        load = LoadGenerator(program)
        times_ms = take_turns(
            targets, rounds, lambda one, body: load.times_ms(one.url, body, seconds)
        )
        per_s = take_turns(
            targets,
            max(3, rounds // 2),
            lambda one, body: load.per_s(one, body, seconds),
        )
    return list(targets), times_ms, per_s


DIRECT = "direct"
# Its HTTP without its decisions, and what could take its place.
STACKS = {"its HTTP alone": "serve_own", "uvicorn and aiohttp": "serve_by_libraries"}
# By target and body: one list per round.
Samples = dict[tuple[str, str], list[list[float]]]


def added(samples: Samples, target: str, body: str, percent: float) -> Estimate:
    """Compute how far the target's percentile over all rounds is above direct's."""
    ours, direct = samples[target, body], samples[DIRECT, body]

    def difference(rounds: np.ndarray) -> float:
        high, low = (
            np.percentile(np.concatenate([of[r] for r in rounds]), percent)
            for of in (ours, direct)
        )
        return float(high - low)

    return Estimate.of(over_rounds(np.arange(len(ours)), difference))


def added_table(samples: Samples, targets: list[str]) -> str:
    """Return the table of added times in ms."""
    rows = []
    for body in BODIES:
        direct = np.percentile(np.concatenate(samples[DIRECT, body]), [50, 99])
        for name in targets:
            n = sum(map(len, samples[name, body]))
            cells = [f"{added(samples, name, body, q):+.2f}" for q in (50, 99)]
            base = f"{direct[0]:.2f}/{direct[1]:.2f}"
            rows.append([name, body, f"{n:,}", base, *cells])
    return table(["", "body", "n", "direct p50/p99", "added p50", "added p99"], rows)


def rates_table(samples: Samples, targets: list[str], column: int) -> str:
    """Median of the rounds and their range, of what LoadGenerator.per_s says."""
    rows = []
    for name in targets:
        cells = []
        for body in BODIES:
            found = [of_round[column] for of_round in samples[name, body]]
            middle = np.median(found)
            cells.append(f"{middle:,.0f} [{min(found):,.0f}, {max(found):,.0f}]")
        rows.append([name, *cells])
    return table(["", *BODIES], rows)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench proxy`."""
    parser.add_argument("--vllm-router", metavar="PATH", help="its command")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    if (os.cpu_count() or 1) < 2:
        raise NotMeasured("two cores are needed")
    names, times_ms, per_s = measure(
        arguments.vllm_router, arguments.rounds, arguments.seconds
    )
    if not arguments.vllm_router:
        print("vllm-router left out: --vllm-router PATH not given\n")
    print(f"## Added TTFT at {RATE_RPS} requests/s, ms\n")
    print(added_table(times_ms, names[1:]))
    print(f"\n## Highest rate, {WORKERS} clients, router on one core, requests/s\n")
    print(f"Median of the rounds and their range.\n\n{rates_table(per_s, names, 0)}")
    print("\n## The router's CPU time for each of these requests, us\n")
    print(rates_table(per_s, names[1:], 1))
    print(f"\n## Decision time, us, p50/p99 of {DECISIONS:,} calls\n")
    print(decisions_table(DECISIONS))
    print(f"\n## A body of 33k ids on the event loop, us, p50/p99 of {BODY_READS}\n")
    print("8 instances; all of it cached there, says the mirror.\n")
    print(body_table(BODY_READS))
    return 0
