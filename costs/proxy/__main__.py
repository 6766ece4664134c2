# SPDX-License-Identifier: Apache-2.0
"""What the proxy adds to the time to first token, and how much one core carries.

`python -m costs.proxy.bench [--vllm-router PATH]` prints Markdown. It needs Go,
for a load generator and a server that are faster than any proxy between them
(bench_proxy_go/), and two cores: the router has one, they share the other. Each round
measures every target with every body, in an order that turns around from round to
round; a target's figure is over all rounds, its 95 % interval from a bootstrap of
rounds. Without `--vllm-router` that router is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from fleet.policies import POLICIES, Ask, Candidate, Snapshot, parameters_of
from fleet.proxy.body import Body
from fleet.proxy.exact import BlockStored, Exact
from fleet.proxy.mirror import Mirror

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RATE = 100
BODIES = {
    "small": ("ids", 16),
    "33k ids": ("ids", 33_000),
    "33k text": ("text", 33_000),
    "33k chat": ("chat", 33_000),
}
ROUTER_CORE, LOAD_CORE = "0", "1"
START_S = 60.0
Interval = tuple[float, float, float]
Samples = dict[tuple[str, str], list[list[float]]]


@contextmanager
def process(core: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process on a core of its own that ends with the block, or with us."""
    pinned = ["taskset", "-c", core, *command]
    with subprocess.Popen(
        pinned,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as one:
        try:
            yield one
        finally:
            one.terminate()
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                one.kill()


@contextmanager
def kvtax_proxy(server: str, folder: Path, *options: str) -> Iterator[str]:
    log = folder / f"{len(list(folder.iterdir()))}.jsonl"
    command = [sys.executable, "-m", "fleet.proxy", "--url", f"a={server}"]
    command += ["--policy", "linear", "--log", str(log), *options]
    with process(ROUTER_CORE, *command) as one:
        yield one.stdout.readline().strip()


@contextmanager
def vllm_router(server: str, command: str) -> Iterator[str]:
    """vllm-router, cache-aware. Raises RuntimeError if it does not start."""
    with socket.socket() as free, socket.socket() as metrics:
        free.bind(("127.0.0.1", 0))
        metrics.bind(("127.0.0.1", 0))
        port, metrics_port = free.getsockname()[1], metrics.getsockname()[1]
    options = ["--worker-urls", server, "--policy", "cache_aware"]
    options += ["--host", "127.0.0.1", "--port", str(port)]
    options += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
    url = f"http://127.0.0.1:{port}"
    with process(ROUTER_CORE, command, *options) as one:
        deadline = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if one.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.2)
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


class Load:
    """Runs the load generator."""

    def __init__(self, program: Path) -> None:
        self._program = str(program)

    def times_ms(self, url: str, body: str, seconds: float) -> list[float]:
        out = self._run(url, body, "-rate", str(RATE), "-seconds", str(seconds))
        return [int(us) / 1000 for us in out.split()]

    def per_s(self, url: str, body: str, seconds: float) -> float:
        out = self._run(url, body, "-workers", "32", "-seconds", str(seconds))
        done, took = out.split()
        return int(done) / float(took)

    def _run(self, url: str, body: str, *options: str) -> str:
        form, tokens = BODIES[body]
        command = ["taskset", "-c", LOAD_CORE, self._program, "load", "-url", url]
        command += ["-form", form, "-tokens", str(tokens), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{url}, {body}: {done.stderr.strip()}")
        return done.stdout


def measure(
    targets: dict[str, str],
    rounds: int,
    one: Callable[[str, str], list[float]],
) -> Samples:
    """Samples of each (target, body), a list for each round."""
    samples: Samples = defaultdict(list)
    for number in range(rounds):
        names = list(targets) if number % 2 == 0 else list(targets)[::-1]
        for body in BODIES:
            for name in names:
                samples[name, body].append(one(targets[name], body))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return samples


def added(
    samples: Samples, target: str, body: str, percent: float, seed: int = 1
) -> Interval:
    """By how much the target's percentile is above direct's, and its 95 % interval."""
    ours, direct = samples[target, body], samples["direct", body]
    random = np.random.default_rng(seed)

    def difference(rounds: np.ndarray) -> float:
        high = np.percentile(np.concatenate([ours[r] for r in rounds]), percent)
        low = np.percentile(np.concatenate([direct[r] for r in rounds]), percent)
        return high - low

    every = np.arange(len(ours))
    drawn = [difference(random.choice(every, len(every))) for _ in range(500)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return difference(every), low, high


def decision_us(policy: str, instances: int, number: int) -> tuple[float, float]:
    """p50 and p99 of so many calls of the policy function, a new snapshot each."""
    random = np.random.default_rng(instances)
    roles = ("prefill", "decode") if policy == "pd_sep" else ("both",)
    decide, parameters = POLICIES[policy], parameters_of(policy, {})
    times = []
    for call in range(number):
        loads = random.integers(0, 30_000, (instances, 3)).tolist()
        candidates = [
            Candidate(f"i{n}", roles[n % len(roles)], a % 16, b, c, a)
            for n, (a, b, c) in enumerate(loads)
        ]
        snapshot = Snapshot(candidates, f"i{call % instances}", call, 0)
        ask = Ask("s", 33_000)
        start = timeit.default_timer()
        decide(ask, snapshot, parameters)
        times.append((timeit.default_timer() - start) * 1e6)
    return tuple(np.percentile(times, [50, 99]))


def print_added(samples: Samples, targets: list[str]) -> None:
    print(f"\n## Added TTFT at {RATE} requests/s, ms\n")
    print("| | body | n | direct p50/p99 | added p50 | added p99 |")
    print("|---|---|---:|---:|---:|---:|")
    for body in BODIES:
        direct = np.percentile(np.concatenate(samples["direct", body]), [50, 99])
        for name in targets:
            n = sum(map(len, samples[name, body]))
            cells = [
                "{:+.2f} [{:+.2f}, {:+.2f}]".format(*added(samples, name, body, p))
                for p in (50, 99)
            ]
            base = f"{direct[0]:.2f}/{direct[1]:.2f}"
            print(f"| {name} | {body} | {n:,} | {base} | {' | '.join(cells)} |")


def print_rates(samples: Samples, targets: list[str]) -> None:
    print("\n## Highest rate, 32 clients, router on one core, requests/s\n")
    print("Median of the rounds and their range.\n")
    print(f"| | {' | '.join(BODIES)} |")
    print(f"|---|{'---:|' * len(BODIES)}")
    for name in targets:
        cells = []
        for body in BODIES:
            rates = [rate for (rate,) in samples[name, body]]
            middle = np.median(rates)
            cells.append(f"{middle:,.0f} [{min(rates):,.0f}, {max(rates):,.0f}]")
        print(f"| {name} | {' | '.join(cells)} |")


def print_decisions(number: int) -> None:
    print(f"\n## Decision time, us, p50/p99 of {number:,} calls\n")
    print("| policy | 8 instances | 64 instances |")
    print("|---|---:|---:|")
    for policy in POLICIES:
        cells = [
            "{:.1f}/{:.1f}".format(*decision_us(policy, n, number)) for n in (8, 64)
        ]
        print(f"| {policy} | {' | '.join(cells)} |")


def print_lookups(number: int) -> None:
    """What the event loop spends on the body of 33k token ids, part by part."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 150_000, 33_000).tolist()
    raw = json.dumps({"prompt": ids, "model": "null"}).encode()
    body = Body(raw)
    mirror, exact = Mirror(8, 10**6), Exact(8)
    keys, hashes = body.keys(), list(range(len(ids) // 16))
    for instance in range(8):
        mirror.add(instance, keys, 1.0)
        exact.apply(instance, [BlockStored(hashes, None, ids[: 16 * len(hashes)], 16)])
    parts = {
        "top level of the JSON, token count": lambda: Body(raw),
        "mirror: keys of its pieces": body.keys,
        "mirror: look-up": lambda: mirror.depths(keys),
        "exact: keys of its blocks and look-up": lambda: exact.cached_tokens(
            body.prompt, "null"
        ),
    }
    print(f"\n## A body of 33k ids on the event loop, us, p50/p99 of {number:,}\n")
    print("All of it cached on 8 instances.\n\n| | |\n|---|---:|")
    for name, part in parts.items():
        times = [1e6 * timeit.timeit(part, number=1) for _ in range(number)]
        p50, p99 = np.percentile(times, [50, 99])
        print(f"| {name} | {p50:,.0f}/{p99:,.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-router", metavar="PATH", help="its command")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    options = parser.parse_args()
    if shutil.which("go") is None:
        print("Go is needed: https://go.dev/dl", file=sys.stderr)
        return 2
    if (os.cpu_count() or 1) < 2:
        print("two cores are needed", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = folder / "bench_proxy"
        go = ["go", "build", "-o", str(program), "."]
        subprocess.run(go, cwd=HERE / "bench_proxy_go", check=True)
        logs = folder / "logs"
        logs.mkdir()
        served = stack.enter_context(process(LOAD_CORE, str(program), "serve"))
        server = served.stdout.readline().strip()
        targets = {"direct": server}
        targets["fleet.proxy"] = stack.enter_context(kvtax_proxy(server, logs))
        if options.vllm_router:
            router = vllm_router(server, options.vllm_router)
            targets["vllm-router"] = stack.enter_context(router)
        else:
            print("vllm-router left out: --vllm-router PATH not given")
        load, seconds = Load(program), options.seconds
        times = measure(
            targets, options.rounds, lambda url, body: load.times_ms(url, body, seconds)
        )
        rates = measure(
            targets,
            max(3, options.rounds // 2),
            lambda url, body: [load.per_s(url, body, seconds)],
        )
    print_added(times, list(targets)[1:])
    print_rates(rates, list(targets))
    print_decisions(20_000)
    print_lookups(300)
    return 0


if __name__ == "__main__":
    sys.exit(main())
