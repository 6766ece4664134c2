# SPDX-License-Identifier: Apache-2.0
"""Describe and sample request traces of LLM services.

A trace is a file of JSON lines, plain, gzip or xz, in one of four formats; its first
line shows which. An output is written whole or not at all, packed as its name says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvtax.cli.options import whole_number

if TYPE_CHECKING:
    from kvtax_fleet.trace import Request


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `kvtax trace`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, summary, add_arguments, action in (
        ("stats", "describe a trace, as Markdown", _add_stats, _stats),
        ("sample", "take whole sessions at random", _add_sample, _sample),
    ):
        description = f"{summary[0].upper()}{summary[1:]}."
        subparser = actions.add_parser(name, help=summary, description=description)
        add_arguments(subparser)
        subparser.set_defaults(action=action)


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises TraceError."""
    arguments.action(arguments)
    return 0


def _add_stats(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "--cache-blocks",
        type=whole_number(1),
        metavar="N",
        help="also compute the hit rate of an LRU cache of N blocks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _stats(arguments: argparse.Namespace) -> None:
    import msgspec

    from kvtax_fleet.trace.stats import describe, markdown

    stats = describe(
        _read(arguments),
        arguments.file.name,
        arguments.cache_blocks,
    )
    if arguments.json:
        print(msgspec.json.encode(stats).decode())
    else:
        print(markdown(stats), end="")


def _add_sample(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("out", type=Path, help="trace to write, in the format `own`")
    parser.add_argument(
        "--requests",
        type=whole_number(1),
        required=True,
        metavar="N",
        help="take whole sessions until they have N requests",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="S",
        help="decides which sessions (default: %(default)s)",
    )


def _sample(arguments: argparse.Namespace) -> None:
    from kvtax.report.render import visible

    from kvtax_fleet.trace import write_trace
    from kvtax_fleet.trace.sample import sample
    from kvtax_fleet.trace.stats import describe, markdown

    source = list(_read(arguments))
    requests = sample(source, arguments.requests, arguments.seed)
    header = {
        "requests": len(requests),
        "source": arguments.file.name,
        "source_requests": len(source),
        "seed": arguments.seed,
    }
    write_trace(arguments.out, header, requests)
    out = visible(str(arguments.out))
    print(f"{out}: {len(requests):,} of {len(source):,} requests\n")
    print(markdown(describe(iter(requests), arguments.out.name)), end="")


def _read(arguments: argparse.Namespace) -> Iterator[Request]:
    from kvtax_fleet.trace import read_trace

    return read_trace(
        arguments.file,
        format=arguments.format,
        block_tokens=arguments.block_tokens,
        time_unit=arguments.time_unit,
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    from kvtax_fleet.trace import FORMATS

    parser.add_argument("file", type=Path, help="trace: JSON lines, plain or packed")
    parser.add_argument(
        "--format", choices=FORMATS, help="format, if the first line does not show it"
    )
    parser.add_argument(
        "--block-tokens",
        type=whole_number(1),
        metavar="N",
        help="block size of mooncake traces (default: 512) and bailian traces "
        "(default: 16)",
    )
    parser.add_argument(
        "--time-unit", choices=("s", "ms"), help="mooncake format: default ms"
    )
