# SPDX-License-Identifier: Apache-2.0
"""What the proxy adds to the time to first token, and how much one core carries.

It needs Go, for a load generator and a server that are faster than any proxy between
them (load_go/), and two cores: the router has one, they share the other. Each round
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

from costs.proxy.parts import body_table, decisions_table
from costs.proxy.report import DIRECT, Samples, added_table, rates_table
from costs.proxy.targets import (
    BODIES,
    LOAD_CORE,
    RATE_RPS,
    WORKERS,
    LoadGenerator,
    Target,
    build_load_program,
    kvtax_proxy,
    process,
    vllm_router,
)

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
    """Targets, times in ms, and what LoadGenerator.per_s says. Raises RuntimeError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = build_load_program(folder)
        served = stack.enter_context(process(LOAD_CORE, str(program), "serve"))
        server = served.stdout.readline().strip()
        targets = {DIRECT: Target(server)}
        proxy = kvtax_proxy(server, folder / "proxy.jsonl")
        targets["fleet.proxy"] = stack.enter_context(proxy)
        if router:
            targets["vllm-router"] = stack.enter_context(vllm_router(server, router))
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


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.proxy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm-router", metavar="PATH", help="its command")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("two cores are needed")
    try:
        names, times_ms, per_s = measure(
            options.vllm_router, options.rounds, options.seconds
        )
    except RuntimeError as error:
        sys.exit(str(error))
    if not options.vllm_router:
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


if __name__ == "__main__":
    main()
