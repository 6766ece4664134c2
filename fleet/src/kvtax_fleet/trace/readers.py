# SPDX-License-Identifier: Apache-2.0
"""Read a trace in any known format; its first line shows which.

The two formats of public traces with one request per line are here.

Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces) does not record
sessions: a request is a session of one turn. Rows for load generators such as aiperf
may have a `session_id`, and instead of a later turn's `timestamp` its `delay`, the
time since the answer before. That answer's time is unknown: such a turn arrives a delay
after the turn before it, or with the last line above that has a time if that is later.

Qwen-Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) has chats that
continue other chats. A session is a chain of `parent_chat_id`, named by the chat it
began with. A second answer to the same chat begins a session, whose parent is the
first's; so does a chat whose parent is not in the file. `turn` is counted anew for
that reason. The trace does not record how long an answer took: a think time is the time
since the turn before was sent, service time included. Ids need not extend those of the
turn before: chat templates drop thinking tokens, and the last block's padding gets
filled.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import msgspec

from kvtax_fleet.trace import sessions, trace_file
from kvtax_fleet.trace.request import (
    BlockHash,
    Count,
    Positive,
    Request,
    Seconds,
    TraceError,
    length_problem,
)
from kvtax_fleet.trace.trace_file import Lines

FORMATS = ("own", "mooncake", "bailian", "sessions")


def read_trace(
    path: str | PathLike[str],
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    time_unit: str | None = None,
) -> Iterator[Request]:
    """Yield the requests of a trace file, plain or packed, in order of arrival.

    `block_tokens` is for the formats that do not name it, `mooncake` and `bailian`;
    `time_unit`, s or ms, is for `mooncake`; None is ms, and an error where rows look
    like seconds.

    Raises TraceError: the file, or something in it, is not what it should be. Raised
    when the reader gets there: the requests before it are good.
    """
    lines = Lines(path)
    if format is None:
        format = detect(lines)
    if block_tokens is not None and format in ("own", "sessions"):
        raise TraceError(
            f"{path}: this format names its block size: leave --block-tokens out"
        )
    if time_unit is not None and format != "mooncake":
        raise TraceError(f"{path}: its unit of time is known: leave --time-unit out")
    if format == "own":
        requests = trace_file.read(lines)
    elif format == "mooncake":
        size = block_tokens or MOONCAKE_BLOCK_TOKENS
        requests = _read_mooncake(lines, size, time_unit)
    elif format == "bailian":
        requests = _read_bailian(lines, block_tokens or BAILIAN_BLOCK_TOKENS)
    elif format == "sessions":
        yield from sessions.read(lines)
        return
    else:
        raise TraceError(f"format {format!r} is none of {', '.join(FORMATS)}")
    yield from _checked(lines, requests)


_ANY = msgspec.json.Decoder(dict[str, Any])
# Fields that the first line of a trace has, by format.
EVIDENCE = {
    "sessions": {"requests", "block_size", "hash_id_scope"},
    "bailian": {"chat_id", "input_length", "output_length"},
    "mooncake": {"input_length", "output_length", "hash_ids"},
}


def detect(lines: Lines) -> str:
    """Recognise the format of a trace by its first line.

    Raises TraceError: no known format begins like this.
    """
    row = lines.first(_ANY)
    if str(row.get("schema")).startswith("kvtax.trace/"):
        return "own"
    for format, fields in EVIDENCE.items():
        if fields <= row.keys():
            return format
    if "text_input" in row or {"messages", "output_length"} <= row.keys():
        raise lines.error(
            "a Mooncake trace with texts in place of `hash_ids`: make hashes of them"
        )
    near = "".join(
        f"; they are those of {format} without {', '.join(sorted(fields - row.keys()))}"
        for format, fields in EVIDENCE.items()
        if fields & row.keys()
    )
    raise lines.error(
        f"no known trace format begins with the fields {', '.join(row) or 'of nothing'}"
        f"{near}: convert it to one of {', '.join(FORMATS)} "
        "(fleet/docs/traces.md has an example)"
    )


def _checked(lines: Lines, requests: Iterator[Request]) -> Iterator[Request]:
    """Yield requests; refuse those out of order or of another block size."""
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
        _check_blocks(lines, request)
        last_s, block_tokens = request.arrival_s, request.block_tokens
        yield request


def _check_blocks(lines: Lines, request: Request) -> None:
    problem = length_problem(
        len(request.hashes), request.block_tokens, request.input_tokens
    )
    if problem:
        raise lines.error(problem)


BAILIAN_BLOCK_TOKENS = 16  # the file names say so: _blksz_16


class BailianRow(msgspec.Struct):
    """A line; `type` (text, search, image, file) and `turn` are not needed."""

    chat_id: int
    timestamp: Seconds
    input_length: Positive
    output_length: Count
    hash_ids: list[BlockHash]
    parent_chat_id: int = -1  # none


_BAILIAN_ROW = msgspec.json.Decoder(BailianRow)


class _Chat(NamedTuple):
    """The part of a chat that later chats refer to."""

    session: str
    turn: int
    arrival_s: float


def _read_bailian(lines: Lines, block_tokens: int) -> Iterator[Request]:
    """Yield the requests of a trace. Memory: 300 bytes per request, for its children.

    Raises TraceError: a line is not what it should be.
    """
    chats: dict[int, _Chat] = {}
    continued: set[int] = set()
    for row in lines.read(_BAILIAN_ROW):
        if row.chat_id in chats:
            raise lines.error(f"chat_id {row.chat_id} is there twice: rename one")
        before = chats.get(row.parent_chat_id)
        think_s = parent = None
        if before is None or row.parent_chat_id in continued:
            chat = _Chat(str(row.chat_id), 0, row.timestamp)
            parent = before and before.session
        else:
            continued.add(row.parent_chat_id)
            chat = _Chat(before.session, before.turn + 1, row.timestamp)
            think_s = max(0.0, row.timestamp - before.arrival_s)
        chats[row.chat_id] = chat
        yield Request(
            arrival_s=row.timestamp,
            session=chat.session,
            turn=chat.turn,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hashes=row.hash_ids,
            block_tokens=block_tokens,
            think_s=think_s,
            parent=parent,
        )


MOONCAKE_BLOCK_TOKENS = 512  # the traces do not name it
# Rows by which a file in seconds is recognised.
DOUBTED_ROWS = 100


class MooncakeRow(msgspec.Struct):
    """A line; `timestamp` and `delay` are milliseconds, in some files seconds."""

    input_length: Positive
    output_length: Count
    hash_ids: list[BlockHash]
    timestamp: Seconds | None = None
    session_id: str | int | None = None
    delay: Seconds | None = None


_MOONCAKE_ROW = msgspec.json.Decoder(MooncakeRow)


def _read_mooncake(
    lines: Lines, block_tokens: int, time_unit: str | None
) -> Iterator[Request]:
    """Yield the requests of a trace.

    Memory: the turns that wait for their delay, and 1 request per named session.

    Raises TraceError: a line is not what it should be.
    """
    waiting: list[tuple[float, int, Request]] = []
    newest_s = 0.0  # of the rows with a time
    before: dict[str, Request] = {}  # the last turn of each session_id
    has_unnamed = False
    rows = lines.read(_MOONCAKE_ROW)
    first = [(row, lines.number) for row in itertools.islice(rows, DOUBTED_ROWS)]
    if time_unit is None and _may_be_seconds([row for row, _ in first]):
        raise lines.error(
            "the first rows have fractions of a millisecond and come at over 1,000 a "
            "second: give --time-unit s if these are seconds, else --time-unit ms"
        )
    per_s = 1.0 if time_unit == "s" else 1e3
    rest = ((row, lines.number) for row in rows)
    for number, (row, lines.number) in enumerate(itertools.chain(first, rest)):
        named = None if row.session_id in (None, "") else str(row.session_id)
        last = None if named is None else before.get(named)
        if last is not None:
            session = last.session
        elif named is None:
            has_unnamed = True
            session = f"row {number}" if str(number) in before else str(number)
        else:
            # Rows without a name have numbers.
            session = f"id {named}" if has_unnamed and named.isdecimal() else named
        arrival_s, think_s = _mooncake_times(lines, row, last, newest_s, per_s)
        request = Request(
            arrival_s=arrival_s,
            session=session,
            turn=0 if last is None else last.turn + 1,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hashes=row.hash_ids,
            block_tokens=block_tokens,
            think_s=think_s,
        )
        _check_blocks(lines, request)
        if named is not None:
            before[named] = request
        heapq.heappush(waiting, (arrival_s, number, request))
        if row.timestamp is not None:
            newest_s = arrival_s
            while waiting and waiting[0][0] <= newest_s:
                yield heapq.heappop(waiting)[-1]
    while waiting:
        yield heapq.heappop(waiting)[-1]


def _may_be_seconds(rows: list[MooncakeRow]) -> bool:
    """Return whether rows have fractions, and come at over one a millisecond."""
    times = [row.timestamp for row in rows if row.timestamp is not None]
    has_fractions = any(time != int(time) for time in times)
    return has_fractions and max(times) - min(times) < len(times)


def _mooncake_times(
    lines: Lines,
    row: MooncakeRow,
    last: Request | None,
    newest_s: float,
    per_s: float,
) -> tuple[float, float | None]:
    """Return arrival and think time of a row; `last` is the turn before it."""
    delay_s = None if row.delay is None else row.delay / per_s
    if row.timestamp is not None:
        arrival_s = row.timestamp / per_s
    elif last is not None and delay_s is not None:
        # The answers' times are unknown, so later than this is possible, too.
        arrival_s = max(last.arrival_s + delay_s, newest_s)
    else:
        raise lines.error(
            "no time of arrival: it needs a timestamp, or a delay and the session_id "
            "of a line above"
        )
    if last is None:
        return arrival_s, None
    waited_s = round(max(0.0, arrival_s - last.arrival_s), 6)
    return arrival_s, waited_s if delay_s is None else delay_s
