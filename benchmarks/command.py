# SPDX-License-Identifier: Apache-2.0
"""Measure what the parts of kvtax cost, and whether their checks catch faults.

Without NAME, lists the benchmarks. `kvtax bench NAME --help` describes one of them;
docs/benchmarks.md has the last results. Questions about vLLM are in studies/.
"""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module with `configure(parser)` and `run(arguments) -> int`."""

    name: str
    minutes: int
    summary: str

    @property
    def module(self) -> str:
        """The module's name: one of benchmarks/, or of direct_read's own."""
        own, _, part = self.name.partition("direct_read_")
        return f"{DIRECT_READ}{part}" if part else f"benchmarks.{own}"


BENCHMARKS = (
    Benchmark("hooks", 15, "step records: cost per engine step, off and on"),
    Benchmark("look", 15, "kvtax look at 100 million steps: time and memory"),
    Benchmark("power", 5, "the smallest growth that a sweep catches"),
    Benchmark("coverage", 2, "intervals of levels on real noise, and false verdicts"),
    Benchmark("zygote", 20, "servers forked and started cold: time, figures, verdicts"),
    Benchmark("axes_gate", 40, "broken connectors caught by the gate along axes"),
    Benchmark("stressor", 25, "a command beside a noisy neighbour"),
    Benchmark("proxy", 17, "the proxy's addition to TTFT, and its throughput"),
    Benchmark("direct_read_cost", 7, "being read by peers: cost per engine step"),
    Benchmark("direct_read_transfer", 3, "direct reads beside bare transfers"),
    Benchmark("direct_read_storm", 10, "direct reads under churn: wrong tokens"),
)
DIRECT_READ = "connectors.direct_read.bench."


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
    module = importlib.import_module(benchmark.module)
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
