# SPDX-License-Identifier: Apache-2.0
"""`python -m fleet.trace stats|sample|synth|twin|anonymise`: look at, cut, make traces.

Exit status: 0; 1 with a message if a trace or what is asked of it is wrong; 2 for a
wrong command line; 128 + number after a signal. What is written is whole or not there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleet.trace import log
from fleet.trace.blocks import CHARS_PER_TOKEN, Tokens
from fleet.trace.markdown import markdown
from fleet.trace.readers import FORMATS, read_trace
from fleet.trace.request import Request, TraceError
from fleet.trace.sample import sample
from fleet.trace.sessions import SESSION_INTERVAL_S
from fleet.trace.stats import TOP_SESSIONS, describe
from fleet.trace.study import beside_study
from fleet.trace.synth import Shape, synth
from fleet.trace.twin import Twin, twin
from lab.serving.supervise import exit_on_signals

T = TypeVar("T", bound=msgspec.Struct)
_DEFAULTS = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    exit_on_signals()
    try:
        arguments.run(arguments)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _stats(arguments: argparse.Namespace) -> None:
    stats = describe(
        _read(arguments),
        arguments.file.name,
        arguments.cache_blocks,
        arguments.sessions,
    )
    if arguments.json:
        print(msgspec.json.encode(stats).decode())
    elif arguments.beside_study:
        print(beside_study(stats), end="")
    else:
        print(markdown(stats), end="")


def _sample(arguments: argparse.Namespace) -> None:
    header = sample(
        arguments.file,
        arguments.out,
        target_requests=arguments.target_requests,
        seed=arguments.seed,
        read=lambda: _read(arguments),
        options=_options(arguments),
    )
    source = header["source"]
    print(
        f"{arguments.out}: {header['requests']:,} of {source['requests']:,} requests, "
        f"{source['sessions_chosen']:,} of {source['sessions']:,} sessions"
    )


def _synth(arguments: argparse.Namespace) -> None:
    header = synth(_shape(arguments, Shape), arguments.out)
    source = header["source"]
    print(
        f"{arguments.out}: {header['requests']:,} requests, {source['blocks']:,} "
        f"blocks, reuse {source['intra_session_reuse']:.4f} in sessions and "
        f"{source['cross_session_reuse']:.4f} across them"
    )


def _twin(arguments: argparse.Namespace) -> None:
    header = twin(_shape(arguments, Twin), arguments.out)
    print(f"{arguments.out}: {header['requests']:,} requests")


def _anonymise(arguments: argparse.Namespace) -> None:
    tokens = Tokens(arguments.chars_per_token, arguments.tokenizer)
    block_tokens = arguments.block_tokens or log.BLOCK_TOKENS
    header, read = log.anonymise(arguments.file, arguments.out, tokens, block_tokens)
    print(f"{arguments.out}: {header['requests']:,} requests")
    if read.counted_tokens:
        print(
            f"the prompts have {read.counted_tokens:,} tokens by the log's own usage, "
            f"{read.estimated_tokens:,} here"
        )
        if tokens.chars_per_token is not None:
            fits = tokens.chars_per_token * read.estimated_tokens / read.counted_tokens
            print(f"--chars-per-token {fits:.2f} would make them equal")


def _shape(arguments: argparse.Namespace, kind: type[T]) -> T:
    """What `_add_shape` has added."""
    values = {name: getattr(arguments, name) for name in kind.__struct_fields__}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise TraceError(str(error)) from None


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "format": arguments.format,
        "block_tokens": arguments.block_tokens,
        "session_interval_s": arguments.session_interval_s,
        "share_prefix": arguments.share_prefix,
        "chars_per_token": arguments.chars_per_token,
        "tokenizer": arguments.tokenizer and str(arguments.tokenizer),
    }


def _read(arguments: argparse.Namespace) -> Iterator[Request]:
    return read_trace(arguments.file, **_options(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleet.trace")
    commands = parser.add_subparsers(required=True)

    stats = commands.add_parser("stats", help="describe a trace, as Markdown")
    _add_source(stats)
    stats.add_argument(
        "--cache-blocks",
        type=_positive,
        metavar="N",
        help="APC of an LRU cache of N blocks",
    )
    stats.add_argument(
        "--sessions",
        type=_positive,
        default=TOP_SESSIONS,
        metavar="N",
        help="a row for each of the N largest sessions (default 5)",
    )
    instead = stats.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print JSON instead")
    instead.add_argument(
        "--beside-study",
        action="store_true",
        help="print only what the reference study says of its trace, and this one",
    )
    stats.set_defaults(run=_stats)

    cut = commands.add_parser("sample", help="take whole sessions at random")
    _add_source(cut)
    cut.add_argument("--target-requests", type=_positive, required=True, metavar="N")
    cut.add_argument("--seed", type=_natural, required=True)
    cut.add_argument(
        "--out", type=Path, required=True, help="gzipped if it ends in .gz"
    )
    cut.set_defaults(run=_sample)

    make = commands.add_parser("synth", help="make up agentic sessions", **_DEFAULTS)
    _add_shape(make, Shape)
    make.set_defaults(run=_synth)

    alike = commands.add_parser(
        "twin", help="make up a trace like the reference study's", **_DEFAULTS
    )
    _add_shape(alike, Twin)
    alike.set_defaults(run=_twin)

    anonymous = commands.add_parser(
        "anonymise", help="write a request log in our own format, without its text"
    )
    anonymous.add_argument("file", type=Path, help="request log: JSON lines, or gzip")
    anonymous.add_argument("out", type=Path, help="gzipped if it ends in .gz")
    _add_block_tokens(anonymous)
    _add_tokens(anonymous)
    anonymous.set_defaults(run=_anonymise)
    return parser


def _add_shape(command: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """An option for each field, and --out."""
    for field in msgspec.inspect.type_info(kind).fields:
        command.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int if isinstance(field.type.type, msgspec.inspect.IntType) else float,
            required=field.required,
            default=None if field.required else field.default,
            help=field.type.extra_json_schema["description"],
        )
    command.add_argument(
        "--out", type=Path, required=True, help="gzipped if it ends in .gz"
    )


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, help="JSON lines, plain or gzip")
    command.add_argument(
        "--format", choices=FORMATS, help="default: what the first line looks like"
    )
    _add_block_tokens(command)
    _add_tokens(command)
    command.add_argument(
        "--session-interval-s",
        type=_seconds,
        default=SESSION_INTERVAL_S,
        metavar="S",
        help="sessions format: time from a session's start to the next's (default 60)",
    )
    command.add_argument(
        "--share-prefix",
        action="store_true",
        help="sessions format: equally long tool and system prompts are the same one",
    )


def _add_block_tokens(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--block-tokens",
        type=_positive,
        metavar="N",
        help="block size of mooncake traces (default 512), of bailian traces and "
        "request logs (default 16)",
    )


def _add_tokens(command: argparse.ArgumentParser) -> None:
    """How to count the tokens of a request log's texts."""
    command.add_argument(
        "--chars-per-token",
        type=_ratio,
        default=CHARS_PER_TOKEN,
        metavar="X",
        help="request logs: characters that a token is taken to have (default 4)",
    )
    command.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="request logs: count by this tokenizer.json, or the one in this folder",
    )


def _natural(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to 2^63")
    return number


def _positive(text: str) -> int:
    if number := _natural(text):
        return number
    raise argparse.ArgumentTypeError("0 is not positive")


def _ratio(text: str) -> float:
    number = float(text)
    if not 0.1 <= number <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.1 to 100")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time")
    return number


if __name__ == "__main__":
    sys.exit(main())
