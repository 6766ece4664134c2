# SPDX-License-Identifier: Apache-2.0
"""Read a trace in any known format; its first line says which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from os import PathLike
from typing import Any

import msgspec

from fleet.trace import bailian, log, mooncake, own, sessions
from fleet.trace.blocks import CHARS_PER_TOKEN, Tokens
from fleet.trace.lines import Lines
from fleet.trace.log_fields import body_of
from fleet.trace.request import Request, TraceError, length_problem

FORMATS = ("own", "mooncake", "bailian", "sessions", "log")

_ANY = msgspec.json.Decoder(dict[str, Any])


def read_trace(
    path: str | PathLike[str],
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    session_interval_s: float = sessions.SESSION_INTERVAL_S,
    share_prefix: bool = False,
    chars_per_token: float = CHARS_PER_TOKEN,
    tokenizer: str | PathLike[str] | None = None,
) -> Iterator[Request]:
    """The requests of a trace file, plain or gzip, one by one in order of arrival.

    `block_tokens` is for the formats that do not name it, `mooncake`, `bailian` and
    `log`; `session_interval_s` and `share_prefix` are for `sessions`: see sessions.py.
    `chars_per_token` and `tokenizer` are for `log`: see blocks.py.

    Raises:
        TraceError: the file, or something in it, is not what it should be. Raised when
            the reader gets there: the requests before it are good.
    """
    lines = Lines(path)
    rows = iter(lines)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path}: the file is empty: a trace has at least one line")
    rows = itertools.chain([first], rows)
    format = format or detect(lines, first)
    if block_tokens is not None and format in ("own", "sessions"):
        raise TraceError(
            f"{path}: this format names its block size: leave --block-tokens out"
        )
    if tokenizer is not None and format != "log":
        raise TraceError(f"{path}: it has its token counts: leave --tokenizer out")
    if format == "own":
        requests = own.read(lines, rows)
    elif format == "mooncake":
        requests = mooncake.read(lines, rows, block_tokens or mooncake.BLOCK_TOKENS)
    elif format == "bailian":
        requests = bailian.read(lines, rows, block_tokens or bailian.BLOCK_TOKENS)
    elif format == "log":
        tokens = Tokens(chars_per_token, tokenizer)
        requests = log.read(lines, rows, tokens, block_tokens or log.BLOCK_TOKENS)
    elif format == "sessions":
        yield from sessions.read(
            lines, rows, interval_s=session_interval_s, share_prefix=share_prefix
        )
        return
    else:
        raise TraceError(f"format {format!r} is none of {', '.join(FORMATS)}")
    yield from _checked(lines, requests)


def detect(lines: Lines, first: bytes) -> str:
    """The format of a trace that begins with some line.

    Raises:
        TraceError: none of those known.
    """
    row = lines.decode(_ANY, first)
    if "schema" in row:
        return "own"
    if "requests" in row:
        return "sessions"
    if body_of(row) is not None:
        return "log"
    if "chat_id" in row:
        return "bailian"
    if "timestamp" in row and "hash_ids" in row:
        return "mooncake"
    raise lines.error(
        f"no known trace format begins with the fields {', '.join(row) or 'of nothing'}"
        f": convert it to one of {', '.join(FORMATS)}"
    )


def _checked(lines: Lines, requests: Iterator[Request]) -> Iterator[Request]:
    """Requests that come line by line, if they are in order and of one block size."""
    last_s, block_tokens = 0.0, None
    for request in requests:
        if request.arrival_s < last_s:
            raise lines.error(
                f"it arrives at {request.arrival_s} s, the one before at {last_s} s: "
                "sort the file by arrival"
            )
        if block_tokens not in (None, request.block_tokens):
            raise lines.error(
                f"blocks of {request.block_tokens} tokens after blocks of "
                f"{block_tokens}: a trace has one block size"
            )
        problem = length_problem(
            len(request.hashes), request.block_tokens, request.input_tokens
        )
        if problem:
            raise lines.error(problem)
        last_s, block_tokens = request.arrival_s, request.block_tokens
        yield request
