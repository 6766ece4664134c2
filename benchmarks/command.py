# SPDX-License-Identifier: Apache-2.0
"""Measure what the parts of kvtax cost, and whether their checks catch faults.

Without NAME, lists the benchmarks. `kvtax bench NAME --help` describes one of them;
docs/benchmarks.md has the last results.
"""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module of benchmarks/ with `configure(parser)` and `run(arguments) -> int`."""

    name: str
    minutes: int
    summary: str


BENCHMARKS = (
    Benchmark("hooks", 15, "step records: cost per engine step, off and on"),
    Benchmark("get_finished", 3, "Mooncake's get_finished, before and after its fix"),
    Benchmark("exposure", 20, "connector work that users feel, by scheduling mode"),
    Benchmark("busy_thread", 11, "token gaps beside a busy thread, by connector"),
    Benchmark("growth", 15, "scheduler-side costs before and after a fix"),
    Benchmark("block_order", 25, "Mooncake's descriptors, by the order of block ids"),
    Benchmark("direct_read_cost", 7, "being read by peers: cost per engine step"),
    Benchmark("direct_read_transfer", 3, "direct reads beside bare transfers"),
    Benchmark("direct_read_storm", 10, "direct reads under churn: wrong tokens"),
    Benchmark("proxy", 17, "the proxy's addition to TTFT, and its throughput"),
    Benchmark("study", 1, "the reference study's sample and forward, fitted"),
    Benchmark("beside_study", 1, "every result of the reference study, beside ours"),
    Benchmark("questions", 1, "routing policies and offloading, by rules set before"),
    Benchmark("host_table", 3, "vLLM's host part of a step, and what its lack does"),
    Benchmark("traces", 3, "reading and sampling traces of 2 million requests"),
    Benchmark("look", 15, "kvtax look at 100 million steps: time and memory"),
    Benchmark("power", 5, "the smallest growth that a sweep catches"),
    Benchmark("axes_gate", 40, "broken connectors caught by the gate along axes"),
    Benchmark("stressor", 25, "a command beside a noisy neighbour"),
    Benchmark("coverage", 5, "intervals of levels, and false verdicts"),
    Benchmark("abort", 5, "aborted and failed transfers on any vLLM: what passes"),
    Benchmark("p2p_tier", 6, "pulls from a busy instance's P2P tier, by step time"),
    Benchmark("transfer_check", 1, "whether Mooncake reports writes too early"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the name, and leave the rest to the named benchmark."""
    parser.usage = "kvtax bench [NAME [options]]"
    parser.add_argument(
        "name",
        nargs="?",
        type=lambda name: name.replace("-", "_"),
        choices=[b.name for b in BENCHMARKS],
        metavar="NAME",
    )
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the named benchmark, or list all. Raises what the benchmark raises."""
    if arguments.name is None:
        print(listing())
        return 0
    benchmark = next(b for b in BENCHMARKS if b.name == arguments.name)
    module = importlib.import_module(f"benchmarks.{benchmark.name}")
    parser = argparse.ArgumentParser(
        f"kvtax bench {benchmark.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    return module.run(parser.parse_args(arguments.options))


def listing() -> str:
    """Return one line per benchmark: name, minutes, summary."""
    return "\n".join(f"{b.name:23} {b.minutes:3} min  {b.summary}" for b in BENCHMARKS)
