# SPDX-License-Identifier: Apache-2.0
"""Read, describe, sample, anonymise and make request traces of LLM services.

A trace is a file of JSON lines, plain, gzip or xz, in one of five formats; its first
line shows which. An output is written whole or not at all, packed as its name says.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from kvtax.cli import Parser
from kvtax.cli.options import add_fields, fields_of, number, whole_number

if TYPE_CHECKING:
    from kvtax_fleet.trace import Request


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `kvtax trace`."""
    actions = parser.add_subparsers(
        metavar="ACTION", required=True, parser_class=_LazyParser
    )
    for name, summary, add_arguments, action in (
        ("stats", "describe a trace, as Markdown", _add_stats, _stats),
        ("sample", "take whole sessions at random", _add_sample, _sample),
        ("anonymise", "turn a request log into a trace", _add_anonymise, _anonymise),
        ("synth", "make a trace of agentic sessions", _SYNTH.add_arguments, _SYNTH.run),
        (
            "study-sample",
            "make a trace like the study's sample",
            _STUDY_SAMPLE.add_arguments,
            _STUDY_SAMPLE.run,
        ),
    ):
        actions.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            add_arguments=add_arguments,
        ).set_defaults(action=action)


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises TraceError."""
    arguments.action(arguments)
    return 0


class _LazyParser(Parser):
    """Parser that adds its arguments on use: modules with the options import numpy."""

    def __init__(
        self,
        *,
        add_arguments: Callable[[argparse.ArgumentParser], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._add_arguments: Callable[[argparse.ArgumentParser], None] | None = (
            add_arguments
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the arguments, then parse."""
        if self._add_arguments is not None:
            self._add_arguments(self)
            self._add_arguments = None
        return super().parse_known_args(args, namespace)


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

    from kvtax_fleet.trace.stats import describe, markdown

    stats = describe(
        _read(arguments),
        arguments.file.name,
        arguments.cache_blocks,
        arguments.sessions,
    )
    _print_left_out(arguments)
    if arguments.json:
        print(msgspec.json.encode(stats).decode())
    else:
        print(markdown(stats), end="")


def _add_sample(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "--target-requests",
        type=whole_number(1),
        required=True,
        metavar="N",
        help="take sessions until they have N requests",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), required=True, help="decides which sessions"
    )
    _add_out(parser)


def _sample(arguments: argparse.Namespace) -> None:
    from kvtax_fleet.trace.sample import sample

    header = sample(
        arguments.file,
        arguments.out,
        target_requests=arguments.target_requests,
        seed=arguments.seed,
        read=lambda: _read(arguments),
        options=dict(_options(arguments)),
    )
    _print_left_out(arguments)
    source = header["source"]
    print(
        f"{arguments.out}: {header['requests']:,} of {source['requests']:,} requests, "
        f"{source['sessions_chosen']:,} of {source['sessions']:,} sessions"
    )


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


class _Made(NamedTuple):
    """Traces that are made up: `make` of a module writes one, from a `kind` in it."""

    module: str
    make: str
    kind: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add an option for each field of the kind."""
        add_fields(parser, self._named(self.kind))
        _add_out(parser)

    def run(self, arguments: argparse.Namespace) -> None:
        """Write the trace, and print how much there is in it."""
        fields = fields_of(arguments, self._named(self.kind))
        header = self._named(self.make)(fields, arguments.out)
        print(f"{arguments.out}: {header['requests']:,} requests", end="")
        if "intra_session_reuse" in (source := header["source"]):
            print(
                f", {source['blocks']:,} blocks, reuse "
                f"{source['intra_session_reuse']:.4f} in sessions and "
                f"{source['cross_session_reuse']:.4f} across them",
                end="",
            )
        print()

    def _named(self, name: str) -> Any:
        return getattr(import_module(f"kvtax_fleet.trace.{self.module}"), name)


_SYNTH = _Made("synth", "synth", "Shape")
_STUDY_SAMPLE = _Made("study_sample", "study_sample", "StudySample")


class _ReadOptions(TypedDict):
    format: str | None
    block_tokens: int | None
    session_interval_s: float
    share_prefix: bool
    chars_per_token: float
    tokenizer: str | None
    time_unit: str | None
    left_out: Counter[str] | None


def _options(arguments: argparse.Namespace) -> _ReadOptions:
    return {
        "format": arguments.format,
        "block_tokens": arguments.block_tokens,
        "session_interval_s": arguments.session_interval_s,
        "share_prefix": arguments.share_prefix,
        "chars_per_token": arguments.chars_per_token,
        "tokenizer": arguments.tokenizer and str(arguments.tokenizer),
        "time_unit": arguments.time_unit,
        "left_out": arguments.left_out,
    }


def _read(arguments: argparse.Namespace) -> Iterator[Request]:
    from kvtax_fleet.trace import read_trace

    return read_trace(arguments.file, **_options(arguments))


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
    parser.add_argument(
        "--share-prefix",
        action="store_true",
        help="sessions format: tool and system prompts of equal lengths are equal",
    )


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="trace to write; packed if its name ends in .gz or .xz",
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
    """Print how many lines were left out, and why, to stderr."""
    from kvtax_fleet.trace.log import explain

    if arguments.left_out:
        total = arguments.left_out.total()
        print(
            f"{arguments.file}: {total:,} lines left out ("
            f"{explain(arguments.left_out)})",
            file=sys.stderr,
        )
