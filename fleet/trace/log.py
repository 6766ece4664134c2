# SPDX-License-Identifier: Apache-2.0
"""Read a request log of a service in production: bodies in, hashes of blocks out.

A line is a request to a chat, messages, responses or completions endpoint, with its
time and its answer or usage (log_fields.py has the names). Nothing of a text is kept.

Logs are written when an answer ends, so lines may be out of order by REORDER_S. A
request without a session's name belongs to the conversation that it goes on: the one
whose last prompt it begins with, message by message, or block by block if it is no
chat. `think_s` contains the service time where the log does not say when answers ended.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import msgspec

from fleet.trace import own
from fleet.trace.blocks import Prompt, Tokens
from fleet.trace.lines import Lines
from fleet.trace.log_fields import (
    FieldError,
    Row,
    answer_of,
    arrival_s,
    body_of,
    end_s,
    session_of,
    usage_of,
)
from fleet.trace.log_text import asked_of, text_of
from fleet.trace.request import Request

BLOCK_TOKENS = 16  # vLLM's
REORDER_S = 600.0

_ROW = msgspec.json.Decoder(dict[str, Any])


class _Call(NamedTuple):
    """A line until its turn comes; `number` is the line's, and settles equal times."""

    arrival_s: float
    number: int
    end_s: float | None
    session: str | None
    prompt: Prompt
    output_tokens: int


class Log:
    """`counted_tokens` of `estimated_tokens` prompt tokens are the server's own count,
    in the lines that have one.
    """

    def __init__(self, lines: Lines, tokens: Tokens, block_tokens: int) -> None:
        self._lines = lines
        self._tokens = tokens
        self._block_tokens = block_tokens
        self.counted_tokens = 0
        self.estimated_tokens = 0

    def requests(self, rows: Iterator[bytes]) -> Iterator[Request]:
        """The requests in order of arrival. Memory: those of REORDER_S, and 300 bytes
        per session.

        Raises:
            TraceError: a line is no request, or is too late in the file.
        """
        sessions = _Sessions()
        origin_s = None
        for call in self._ordered(rows):
            origin_s = call.arrival_s if origin_s is None else origin_s
            name, turn, think_s = sessions.place(call)
            yield Request(
                arrival_s=round(call.arrival_s - origin_s, 6),
                session=name,
                turn=turn,
                input_tokens=call.prompt.tokens,
                output_tokens=call.output_tokens,
                hashes=call.prompt.blocks.tolist(),
                block_tokens=self._block_tokens,
                think_s=think_s,
            )

    def _ordered(self, rows: Iterator[bytes]) -> Iterator[_Call]:
        waiting: list[_Call] = []
        newest_s = given_s = 0.0
        for line in rows:
            call = self._call(self._lines.decode(_ROW, line))
            if call.arrival_s < given_s:
                raise self._lines.error(
                    f"it arrived over {REORDER_S:g} s before a line above it: sort the "
                    "file by time"
                )
            heapq.heappush(waiting, call)
            newest_s = max(newest_s, call.arrival_s)
            while waiting[0].arrival_s < newest_s - REORDER_S:
                call = heapq.heappop(waiting)
                given_s = call.arrival_s
                yield call
        while waiting:
            yield heapq.heappop(waiting)

    def _call(self, row: Row) -> _Call:
        try:
            return self._read(row)
        except FieldError as error:
            raise self._lines.error(f"{error}: mend or remove the line") from None

    def _read(self, row: Row) -> _Call:
        arrived_s = arrival_s(row)
        ended_s = end_s(row, arrived_s)
        body = body_of(row)
        if body is None:
            raise FieldError("no body with messages, prompt or input")
        prompt = self._tokens.prompt(asked_of(body), self._block_tokens)
        if not prompt.tokens:
            raise FieldError("the prompt is empty")
        counted, output_tokens = usage_of(row)
        if counted is not None:
            self.counted_tokens += counted
            self.estimated_tokens += prompt.tokens
        if output_tokens is None:
            answer = answer_of(row)
            if answer is None:
                raise FieldError("neither usage nor an answer: how long was it?")
            output_tokens = self._tokens.count(text_of(answer))
        return _Call(
            arrived_s,
            self._lines.number,
            ended_s,
            session_of(row),
            prompt,
            output_tokens,
        )


class _Turn(NamedTuple):
    """A session's last one."""

    session: str
    number: int
    end_s: float


class _Sessions:
    """Which turn of which session a request is; sessions get names of their own."""

    def __init__(self) -> None:
        self._names = (f"s{number}" for number in itertools.count())
        self._named: dict[str, _Turn] = {}  # by what the log calls them
        self._unnamed: dict[bytes, _Turn] = {}  # by the hash of the last prompt

    def place(self, call: _Call) -> tuple[str, int, float | None]:
        """Session, turn and think time. Calls come in order of arrival."""
        before = self._before(call)
        if before is None:
            turn, think_s = _Turn(next(self._names), 0, 0.0), None
        else:
            turn = before._replace(number=before.number + 1)
            think_s = round(max(0.0, call.arrival_s - before.end_s), 6)
        ended_s = call.arrival_s if call.end_s is None else call.end_s
        turn = turn._replace(end_s=ended_s)
        if call.session is not None:
            self._named[call.session] = turn
        elif call.prompt.beginnings:
            self._unnamed[call.prompt.beginnings[-1]] = turn
        return turn.session, turn.number, think_s

    def _before(self, call: _Call) -> _Turn | None:
        if call.session is not None:
            return self._named.get(call.session)
        shorter = call.prompt.beginnings[-2::-1]
        known = (self._unnamed.pop(one, None) for one in shorter)
        return next((turn for turn in known if turn is not None), None)


def read(
    lines: Lines, rows: Iterator[bytes], tokens: Tokens, block_tokens: int
) -> Iterator[Request]:
    """The requests of a log. Raises TraceError."""
    return Log(lines, tokens, block_tokens).requests(rows)


def anonymise(
    path: str | PathLike[str],
    out: str | PathLike[str],
    tokens: Tokens,
    block_tokens: int,
) -> tuple[dict[str, Any], Log]:
    """Write a log in our own format; the header, and the log as it was read.

    The key of the hashes is not kept, and neither names nor file are named.

    Raises:
        TraceError: a line is no request, or `out` cannot be written.
    """
    header = {
        "requests": sum(1 for _ in Lines(path)),
        "source": {
            "made_by": "fleet.trace anonymise",
            "chars_per_token": tokens.chars_per_token,
        },
    }
    lines = Lines(path)
    log = Log(lines, tokens, block_tokens)
    own.write(out, header, log.requests(iter(lines)))
    return header, log
