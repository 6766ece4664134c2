# SPDX-License-Identifier: Apache-2.0
"""The proxy's addition to the time to first token, and its throughput per core.

It needs Go, for a load generator and a server that are faster than any proxy between
them (proxy_load.go), and two cores: the router has one, they share the other. Each
round measures every target with every body, in an order that turns around from round
to round. A target's figure is over all rounds, its 95 % interval from a bootstrap of
rounds. If vllm-router cannot be installed, it is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch import vllm_router as vllm_router_command
from kvtax_fleet.launch.kvindexd import kvindexd
from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.policies.decision import RequestInfo
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.kvindexd import Kvindexd
from kvtax_fleet.proxy.router import Mirror
from kvtax_fleet.records.decisions import Candidate, Snapshot
from kvtax_fleet.records.instances import Instance

from benchmarks.proxy_targets import (
    BODIES,
    LOAD_CORE,
    WORKERS,
    LoadGenerator,
    Target,
    build_load_program,
    kvtax_proxy,
    process,
    url_of,
    vllm_router,
)
from benchmarks.results import NotMeasured, configure_rounds, publish
from kvtax.engine import ServerError
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.resampling import over_rounds

DECISIONS, BODY_READS = 20_000, 300
PERCENTS = (50, 95, 99)


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
) -> tuple[dict[str, float], Samples, Samples]:
    """Return the targets, with their memory in MiB, times in ms, and rates.

    A rate is as LoadGenerator.per_s says it. Raises NotMeasured.
    """
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        program = build_load_program(folder)
        served = ends.enter_context(process(LOAD_CORE, str(program), "serve"))
        server = url_of(served)
        targets = {DIRECT: Target(server)}
        proxy = kvtax_proxy(server, folder / "proxy.jsonl")
        targets["kvtax_fleet.proxy"] = ends.enter_context(proxy)
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
        memory_mib = {
            name: target.peak_mib() if target.pid else 0.0
            for name, target in targets.items()
        }
    return memory_mib, times_ms, per_s


DIRECT = "direct"
# By target and body: one list per round.
Samples = dict[tuple[str, str], list[list[float]]]


def added(samples: Samples, target: str, body: str, percent: float) -> Estimate:
    """Compute how far the target's percentile over all rounds is above direct's."""
    ours, direct = samples[target, body], samples[DIRECT, body]

    def difference(rounds: np.ndarray) -> float:
        high, low = (
            np.percentile(np.concatenate([of[int(r)] for r in rounds]), percent)
            for of in (ours, direct)
        )
        return float(high - low)

    return Estimate.of(over_rounds(np.arange(len(ours), dtype=float), difference))


def added_table(samples: Samples, targets: list[str]) -> str:
    """Return the table of added times in ms."""
    rows = []
    for body in BODIES:
        direct = np.percentile(np.concatenate(samples[DIRECT, body]), PERCENTS)
        for name in targets:
            n = sum(map(len, samples[name, body]))
            cells = [f"{added(samples, name, body, q):+.2f}" for q in PERCENTS]
            base = "/".join(f"{ms:.2f}" for ms in direct)
            rate = BODIES[body].rate_rps
            rows.append([name, body, str(rate), f"{n:,}", base, *cells])
    quantiles = [f"p{q}" for q in PERCENTS]
    head = ["", "body", "requests/s", "n", f"direct {'/'.join(quantiles)}"]
    return table([*head, *(f"added {name}" for name in quantiles)], rows)


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
    configure_rounds(parser, "proxy", 10, minimum=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    if (os.cpu_count() or 1) < 2:
        raise NotMeasured("two cores are needed")
    router, versions = None, versions_beside()
    try:
        router = str(vllm_router_command.executable())
        versions["vllm-router"] = vllm_router_command.version()
    except ServerError as error:
        print(f"vllm-router is left out: {error}", file=sys.stderr)
    memory_mib, times_ms, per_s = measure(router, arguments.rounds, arguments.seconds)
    names = list(memory_mib)
    rows = [[name, f"{memory_mib[name]:,.0f}"] for name in names[1:]]
    parts = [
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "## Added TTFT, ms",
        added_table(times_ms, names[1:]),
        f"## Highest rate, {WORKERS} clients, router on one core, requests/s",
        f"Median of the rounds and their range.\n\n{rates_table(per_s, names, 0)}",
        "## The router's CPU time for each of these requests, us",
        rates_table(per_s, names[1:], 1),
        "## The router's peak memory after all of these, MiB",
        table(["", "MiB"], rows),
        f"## Decision time, us, p50/p99 of {DECISIONS:,} calls",
        decisions_table(DECISIONS),
        f"## A body of 33k ids on the event loop, us, p50/p99 of {BODY_READS}",
        "8 instances; all of it cached there, says the mirror.",
        body_table(BODY_READS),
    ]
    results = {
        "versions": versions,
        "bodies": {name: kind._asdict() for name, kind in BODIES.items()},
        "seconds": arguments.seconds,
        "times_ms": _by_target(times_ms, _quantiles),
        "per_s_and_cpu_us": _by_target(per_s, list),
        "peak_mib": memory_mib,
    }
    return publish("proxy", arguments.out, parts, results, {})


def versions_beside() -> dict[str, str]:
    """Return the versions of what is measured beside the proxy, and of what it uses."""
    names = ("aiohttp", "uvloop")
    go = subprocess.run(["go", "version"], capture_output=True, text=True, check=True)
    found = {name: importlib.metadata.version(name) for name in names}
    return {"Go": go.stdout.split()[2].removeprefix("go"), **found}


def _by_target(samples: Samples, of_rounds: Callable) -> dict[str, Any]:
    return {f"{name}, {body}": of_rounds(of) for (name, body), of in samples.items()}


def _quantiles(rounds: list[list[float]]) -> list[dict[str, float]]:
    """Return n and the percentiles of each round."""
    return [
        {"n": len(times)}
        | {f"p{q}": round(float(np.percentile(times, q)), 3) for q in PERCENTS}
        for times in rounds
    ]


INSTANCES = 8


def decision_us(policy: str, instances: int, number: int) -> tuple[float, float]:
    """p50 and p99 of `number` calls of the policy function, each on a new snapshot."""
    random = np.random.default_rng(instances)
    roles: list[Literal["both", "prefill", "decode"]] = ["both"]
    if policy == "pd_sep":
        roles = ["prefill", "decode"]
    decide, parameters = POLICIES[policy].decide, parameters_of(policy, {})
    times = []
    for call in range(number):
        loads = random.integers(0, 30_000, (instances, 3)).tolist()
        candidates = [
            Candidate(f"i{n}", roles[n % len(roles)], a % 16, b, c, a)
            for n, (a, b, c) in enumerate(loads)
        ]
        snapshot = Snapshot(candidates, f"i{call % instances}", call, 0)
        ask = RequestInfo("s", 33_000)
        start = timeit.default_timer()
        decide(ask, snapshot, parameters)
        times.append((timeit.default_timer() - start) * 1e6)
    return tuple(np.percentile(times, [50, 99]))


def decisions_table(number: int) -> str:
    rows = [
        [
            policy,
            *("{:.1f}/{:.1f}".format(*decision_us(policy, n, number)) for n in (8, 64)),
        ]
        for policy in POLICIES
    ]
    return table(["policy", "8 instances", "64 instances"], rows)


def body_table(number: int) -> str:
    """Time the parts of a body of 33k token ids on the event loop, in us."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 150_000, 33_000).tolist()
    raw = json.dumps({"prompt": ids, "model": "null"}).encode()
    body = Body(raw)
    mirror = Mirror(INSTANCES, 10**6)
    keys = body.keys()
    for instance in range(INSTANCES):
        mirror.add(instance, keys, 1.0)
    fresh = iter([Body(raw) for _ in range(number)])  # a body keeps its keys
    parts = {
        "top level of the JSON, token count": lambda: Body(raw),
        "mirror: keys of its pieces": lambda: next(fresh).keys(),
        "mirror: look-up": lambda: mirror.depths(keys),
    }
    times_us = {
        name: [1e6 * timeit.timeit(part, number=1) for _ in range(number)]
        for name, part in parts.items()
    }
    times_us["exact: asking kvindexd (CPU time)"] = _asking_us(body, number)
    rows = []
    for name, times in times_us.items():
        p50, p99 = np.percentile(times, [50, 99])
        rows.append([name, f"{p50:,.0f}/{p99:,.0f}"])
    return table(["", "us"], rows)


def _asking_us(body: Body, number: int) -> list[float]:
    """Return this thread's CPU time for each of `number` requests to a kvindexd.

    It follows nobody: what it has to say is small in any case. Raises ServerError.
    """
    names = [f"i{n}" for n in range(INSTANCES)]

    async def ask(address: str) -> list[float]:
        times = []
        async with Kvindexd(address, names) as client:
            for _ in range(number):
                begun_ns = time.thread_time_ns()
                await client.cached_tokens(body)
                times.append((time.thread_time_ns() - begun_ns) / 1000)
        return times

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "instances.json"
        nobody = f"ipc://{scratch}/nobody"
        write_instances(
            file, [Instance(n, f"http://{n}", kv_events=nobody) for n in names]
        )
        with kvindexd(file, Path(scratch) / "log") as address:
            return asyncio.run(ask(address))
