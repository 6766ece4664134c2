# SPDX-License-Identifier: Apache-2.0
"""Measure what the parts of kvtax cost, and how often its verdicts are right.

    python -m benchmarks                     lists the benchmarks
    python -m benchmarks NAME --help         describes one of them

docs/benchmarks.md has the last results. Questions about vLLM are in studies/.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module with `configure(parser)` and `run(arguments) -> int`."""

    name: str
    minutes: int
    summary: str

    @property
    def module(self) -> str:
        """The module's name."""
        return f"benchmarks.{self.name}"


BENCHMARKS = (
    Benchmark("hooks", 4, "recorder: CPU time that it adds to an engine step"),
    Benchmark("look", 3, "kvtax look at 10 million steps: CPU time and memory"),
    Benchmark("power", 5, "the smallest growth that a sweep catches"),
    Benchmark("coverage", 2, "intervals of levels on real noise, and false verdicts"),
    Benchmark("stressor", 25, "a command beside a noisy neighbour"),
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names, or list all; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    parser.add_argument("name", nargs="?", choices=known, metavar="NAME")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        print(listing())
        return 0
    module = importlib.import_module(known[arguments.name].module)
    own = argparse.ArgumentParser(
        f"python -m benchmarks {arguments.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(own)
    try:
        return int(module.run(own.parse_args(arguments.options)))
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"{arguments.name}: {error}", file=sys.stderr)
        return int(code)


def listing() -> str:
    """Return one line per benchmark: name, minutes, summary."""
    return "\n".join(f"{b.name:20} {b.minutes:3} min  {b.summary}" for b in BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
