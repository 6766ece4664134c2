# SPDX-License-Identifier: Apache-2.0
"""Measure what a connector costs per engine step, and check it against limits.

Takes about a minute. An engine core of vLLM runs on the CPU with a model that computes
nothing, and is held at levels of cached blocks (with 8 and with 32 running requests),
running requests, context, arrivals, an arriving prompt's length, its cached part and
its fragments. Prints Markdown.

MODULE:CLASS is importable in the environment that has vLLM, or from the working folder.
Exit codes: 0 all limits kept; 1 a limit is broken, or a method grows that did not in
the cell of --since; 2 bad input; 3 the connector could not be measured; 4 another
measurement has the machine: run the gate again when it has ended.
"""

from __future__ import annotations

import argparse
import os

from kvtax.cli.options import (
    add_connector_config,
    add_limits,
    add_vllm,
    optional_path,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax gate`."""
    parser.add_argument(
        "connector",
        metavar="MODULE:CLASS",
        help="the connector; or the name of one that vLLM has",
    )
    add_connector_config(parser)
    add_vllm(
        parser,
        python="interpreter whose vLLM is measured, left as it is (default: this one)",
        vllm="release that is installed for this (needs a checkout)",
    )
    add_limits(parser, "TOML file with [axes.*] tables")
    parser.add_argument(
        "--since",
        type=optional_path,
        metavar="OLD",
        help="cell of an older commit (--out)",
    )
    parser.add_argument(
        "--out", type=optional_path, metavar="CELL", help="write the cell"
    )
    parser.add_argument(
        "--summary",
        type=optional_path,
        metavar="FILE",
        help="append what is printed, for the summary of a CI step",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the gate; return 1 if a limit is broken. Raises as kvtax.axes.gate.gate."""
    from kvtax.axes.gate import GateOptions, gate, markdown
    from kvtax.config import ConfigError
    from kvtax.verdict.limits import AxisLimits, read_limits

    if arguments.limits:
        tables = read_limits(arguments.limits).axes.values()
        if not any(table != AxisLimits() for table in tables):
            raise ConfigError(
                f"{arguments.limits} limits nothing along an axis ([axes.running], "
                "...), so nothing would be checked"
            )
    # The working folder is on the path of the engine, as with `python -m`.
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    names = GateOptions.__dataclass_fields__
    result = gate(GateOptions(**{name: getattr(arguments, name) for name in names}))
    print(markdown(result), end="")
    return int(result.worse)
