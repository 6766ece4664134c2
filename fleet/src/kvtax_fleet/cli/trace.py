# SPDX-License-Identifier: Apache-2.0
"""Describe and anonymise request traces of LLM services.

A trace is a file of JSON lines, plain, gzip or xz, in one of five formats; its first
line shows which. An output is written whole or not at all, packed as its name says.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from kvtax.cli.options import number, whole_number


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `kvtax trace`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, summary, add_arguments, action in (
        ("stats", "describe a trace, as Markdown", _add_stats, _stats),
        ("anonymise", "turn a request log into a trace", _add_anonymise, _anonymise),
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
    from kvtax_fleet.trace.stats import TOP_SESSIONS

    _add_source(parser)
    parser.add_argument(
        "--cache-blocks",
        type=whole_number(1),
        metavar="N",
        help="also compute the hit rate of an LRU cache of N blocks",
    )
    parser.add_argument(
        "--sessions",
        type=whole_number(1),
        default=TOP_SESSIONS,
        metavar="N",
        help=f"number of the largest sessions to list (default: {TOP_SESSIONS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _stats(arguments: argparse.Namespace) -> None:
    import msgspec

    from kvtax_fleet.trace import read_trace
    from kvtax_fleet.trace.stats import describe, markdown

    requests = read_trace(
        arguments.file,
        format=arguments.format,
        block_tokens=arguments.block_tokens,
        session_interval_s=arguments.session_interval_s,
        chars_per_token=arguments.chars_per_token,
        tokenizer=arguments.tokenizer,
        time_unit=arguments.time_unit,
        left_out=arguments.left_out,
    )
    stats = describe(
        requests,
        arguments.file.name,
        arguments.cache_blocks,
        arguments.sessions,
    )
    _print_left_out(arguments)
    if arguments.json:
        print(msgspec.json.encode(stats).decode())
    else:
        print(markdown(stats), end="")


def _add_anonymise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="request log: JSON lines, plain or packed"
    )
    parser.add_argument("out", type=Path, help="trace to write")
    _add_block_tokens(parser)
    _add_tokens(parser)
    _add_skip_unusable(parser)


def _anonymise(arguments: argparse.Namespace) -> None:
    from kvtax_fleet.trace import log
    from kvtax_fleet.trace.log_prompt import Tokens

    tokens = Tokens(arguments.chars_per_token, arguments.tokenizer)
    block_tokens = arguments.block_tokens or log.BLOCK_TOKENS
    header, read = log.anonymise(
        arguments.file, arguments.out, tokens, block_tokens, arguments.left_out
    )
    _print_left_out(arguments)
    print(f"{arguments.out}: {header['requests']:,} requests")
    if read.counted_tokens:
        print(
            f"prompts: {read.counted_tokens:,} tokens in the log's usage fields, "
            f"{read.estimated_tokens:,} estimated"
        )
        if tokens.chars_per_token is not None:
            fitting = tokens.chars_per_token * read.estimated_tokens
            fitting /= read.counted_tokens
            print(f"--chars-per-token {fitting:.2f} would make them equal")


def _add_source(parser: argparse.ArgumentParser) -> None:
    from kvtax_fleet.trace import FORMATS
    from kvtax_fleet.trace.sessions import SESSION_INTERVAL_S

    parser.add_argument("file", type=Path, help="trace: JSON lines, plain or packed")
    parser.add_argument(
        "--format", choices=FORMATS, help="format, if the first line does not show it"
    )
    _add_block_tokens(parser)
    _add_tokens(parser)
    _add_skip_unusable(parser)
    parser.add_argument(
        "--time-unit", choices=("s", "ms"), help="mooncake format: default ms"
    )
    parser.add_argument(
        "--session-interval-s",
        type=number(0),
        default=SESSION_INTERVAL_S,
        metavar="S",
        help="sessions format: seconds from a session's start to the next one's "
        f"(default: {SESSION_INTERVAL_S:g})",
    )


def _add_block_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-tokens",
        type=whole_number(1),
        metavar="N",
        help="block size of mooncake traces (default: 512), of bailian traces and "
        "request logs (default: 16)",
    )


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    """Add the two ways to count the tokens of a request log's texts."""
    from kvtax_fleet.trace.log_prompt import CHARS_PER_TOKEN

    parser.add_argument(
        "--chars-per-token",
        type=number(0.1, 100),
        default=CHARS_PER_TOKEN,
        metavar="X",
        help="request logs: estimate one token for X characters "
        f"(default: {CHARS_PER_TOKEN:g})",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="request logs: count tokens with this tokenizer.json, or the one in this "
        "folder (needs the extra [proxy])",
    )


def _add_skip_unusable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-unusable",
        dest="left_out",
        action="store_const",
        const=Counter(),
        help="request logs: leave out the lines that are no requests with an answer, "
        "and count them by reason",
    )


def _print_left_out(arguments: argparse.Namespace) -> None:
    from kvtax_fleet.trace.log import explain

    if arguments.left_out:
        total = arguments.left_out.total()
        print(
            f"{arguments.file}: {total:,} lines left out ("
            f"{explain(arguments.left_out)})",
            file=sys.stderr,
        )
