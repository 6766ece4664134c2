# SPDX-License-Identifier: Apache-2.0
"""Read a request log of a service in production: bodies in, hashes of blocks out.

A line is a request to a chat, messages, responses or completions endpoint, with its
time and its answer or usage. Fields are found by their common names; a name with a dot
is a field of an object. Objects may be JSON in a string, as gateways write bodies. No
text is kept. Requests to endpoints that generate nothing are no usable lines, nor are
those that continue a stored response, whose text is elsewhere.

Logs are written when an answer ends, so lines may be out of order by REORDER_S. A
request without a session's name belongs to the conversation that it continues: the one
whose last prompt it begins with, message by message, or block by block if it is no
chat. `think_s` contains the service time where the log has no times of answers' ends.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from os import PathLike
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvtax_fleet.trace import trace_file
from kvtax_fleet.trace.log_prompt import (
    FieldError,
    LogRow,
    Prompt,
    Tokens,
    asked_of,
    text_of,
)
from kvtax_fleet.trace.request import Request, TraceError
from kvtax_fleet.trace.trace_file import Lines

BLOCK_TOKENS = 16  # vLLM's
MOST_TOKENS = 2**31 - 1  # of a request in a trace
REORDER_S = 600.0

# Names of fields, the first that is there counts.
TIME = (
    "timestamp",
    "time",
    "ts",
    "start_time",
    "startTime",
    "started_at",
    "request_time",
    "arrival_time",
    "created_at",
    "created",
)
END = ("end_time", "endTime", "ended_at", "finished_at", "completed_at")
DURATION_S = {"duration_s": 1.0, "latency_s": 1.0, "elapsed_s": 1.0}
DURATION_S |= {"duration_ms": 1e-3, "latency_ms": 1e-3, "elapsed_ms": 1e-3}
SESSION = (
    "session_id",
    "sessionId",
    "session.id",
    "session",
    "conversation_id",
    "thread_id",
    "metadata.session_id",
    "headers.x-session-id",
    "headers.X-Session-Id",
)
BODY = ("body", "request_body", "request.body", "request", "payload")
PROMPT = ("messages", "prompt", "input")  # what makes an object a body
ANSWER = (
    "response_body",
    "response.body",
    "response",
    "answer",
    "completion",
    "output",
)
INPUT_TOKENS = ("prompt_tokens", "input_tokens")
# Anthropic counts these beside its input_tokens.
CACHED_TOKENS = ("cache_read_input_tokens", "cache_creation_input_tokens")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens", "output_length")
# A failed request's status is 400 or more, or says so; or it has an error.
STATUS = (
    "status",
    "status_code",
    "statusCode",
    "http_status",
    "response.status",
    "response.status_code",
)
FAILURES = frozenset(
    {"failure", "failed", "fail", "error", "errored", "timeout"}
    | {"cancelled", "canceled", "aborted", "rejected"}
)
SUCCESS = ("success", "ok")  # false of a failed request
ERROR = ("error", "error_str", "response.error", "response_body.error")
# Where a request went: a path or URL, or a gateway's word.
ENDPOINT = (
    "path",
    "url",
    "uri",
    "endpoint",
    "route",
    "request_path",
    "request.path",
    "request.url",
    "call_type",
    "operation",
)
_NO_ENDPOINT = re.compile(r"/?(\w+/)?(v\d+\w*)?/?")  # as in a base URL
_GENERATES = re.compile(
    r"[/:](completions?|chat|messages|responses|converse(-stream)?|invoke(-with\S*)?"
    r"|(stream)?generate(_stream|content)?)/?$"
)
_GENERATES_NOT = re.compile(
    r"token|embed|moderat|rerank|score|classif|pool|speech|audio|transcri|image|batch"
)
# What a body continues; its text is in no field.
CONTINUED = ("previous_response_id", "conversation")
# Estimates that are so many times larger or smaller than the usage are named.
FAR_FACTOR = 3.0
FAR_TOKENS = 100  # of a chat template, which the text is without
log = logging.getLogger(__name__)

# Seconds since 1970 are below 1e11 until the year 5138.
_UNITS_S = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6), (float("inf"), 1e-9))

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
    """Reader of a request log.

    Of the lines whose usage counts the prompt's tokens, `counted_tokens` is that count
    and `estimated_tokens` ours; `far_lines` are those in which the two are far apart.
    """

    def __init__(self, lines: Lines, tokens: Tokens, block_tokens: int) -> None:
        self._lines = lines
        self._tokens = tokens
        self._block_tokens = block_tokens
        self.counted_tokens = 0
        self.estimated_tokens = 0
        self.far_lines = 0

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order of arrival.

        Memory: those of REORDER_S, and 300 bytes per session.

        Raises TraceError: a line is no request, or is too late in the file; or none is
        a request.
        """
        sessions = _Sessions()
        origin_s = None
        for call in self._ordered():
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
        if origin_s is None:
            raise TraceError(
                f"{self._lines.path}: no line is a usable request "
                f"({explain(self._lines.left_out)})"
            )
        if self.far_lines:
            log.warning(
                "%s: in %d lines the usage counts %g times more or fewer prompt tokens "
                "than the text has (%s against %s in all lines with a usage): the text "
                "is not what the model read, or give --tokenizer or --chars-per-token",
                *(self._lines.path, self.far_lines, FAR_FACTOR),
                *(f"{self.counted_tokens:,}", f"{self.estimated_tokens:,}"),
            )

    def _ordered(self) -> Iterator[_Call]:
        waiting: list[_Call] = []
        newest_s = given_s = 0.0
        for row in self._lines.read(_ROW):
            try:
                call = self._call(row)
            except (FieldError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    error = FieldError("the body is nested too deeply")
                remedy = "mend or remove the line, or leave such lines out "
                remedy += "(--skip-unusable)"
                self._lines.reject(f"{error}: {remedy}", str(error))
                continue
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

    def _call(self, row: LogRow) -> _Call:
        if failed(row):
            raise FieldError("the request failed")
        if went_elsewhere(row):
            raise FieldError("a request to an endpoint that generates nothing")
        arrived_s = arrival_s(row)
        ended_s = end_s(row, arrived_s)
        body = body_of(row)
        if body is None:
            raise FieldError("no body with messages, prompt or input")
        if any(_found(body, CONTINUED)):
            raise FieldError("it continues a stored response, whose text is elsewhere")
        prompt = self._tokens.prompt(asked_of(body), self._block_tokens)
        if not prompt.tokens:
            raise FieldError("the prompt is empty")
        counted, output_tokens = usage_of(row)
        if counted is not None:
            self.counted_tokens += counted
            self.estimated_tokens += prompt.tokens
            low, high = sorted((counted, prompt.tokens))
            self.far_lines += high > FAR_FACTOR * low + FAR_TOKENS
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
    """A session's last turn."""

    session: str
    number: int
    end_s: float


class _Sessions:
    """Assigns requests to turns of sessions, which get new names."""

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


def explain(left_out: Counter[str] | None) -> str:
    """List the reasons for which lines were left out, the most frequent first."""
    reasons = (left_out or Counter()).most_common()
    return ", ".join(f"{count:,}: {reason}" for reason, count in reasons)


def anonymise(
    path: str | PathLike[str],
    out: str | PathLike[str],
    tokens: Tokens,
    block_tokens: int,
    left_out: Counter[str] | None = None,
) -> tuple[dict[str, Any], Log]:
    """Write a log in our own format; return the header and the reader.

    The key of the hashes is not kept; neither sessions nor the file are named. With
    `left_out`, the log is read twice: which lines are requests is not known before.

    Raises TraceError: a line is no request, or `out` cannot be written.
    """
    trace_file.require_file(path)
    source: dict[str, Any] = {
        "made_by": "kvtax trace anonymise",
        "chars_per_token": tokens.chars_per_token,
    }
    if left_out is None:
        requests = sum(1 for _ in Lines(path))
    else:
        first = Log(Lines(path, left_out), tokens, block_tokens)
        requests = sum(1 for _ in first.requests())
        source["left_out"] = dict(left_out)
    header = {"requests": requests, "source": source}
    log = Log(Lines(path, left_out), tokens, block_tokens)
    trace_file.write_trace(out, header, log.requests())
    return header, log


def failed(row: LogRow) -> bool:
    """Recognise a request that failed: the text of its error is no answer."""
    for _, status in _found(row, STATUS):
        # As in "500 Internal Server Error".
        first = status.split()[:1] if isinstance(status, str) else [status]
        if any(_is_number(word) and float(word) >= 400 for word in first):
            return True
        if isinstance(status, str) and status.lower() in FAILURES:
            return True
    if any(success is False for _, success in _found(row, SUCCESS)):
        return True
    return any(error not in ("", {}, [], False) for _, error in _found(row, ERROR))


def went_elsewhere(row: LogRow) -> bool:
    """Recognise a request to an endpoint that generates nothing, such as tokenize."""
    for _, where in _found(row, ENDPOINT):
        if not isinstance(where, str):
            continue
        path = urlsplit(where).path if "/" in where else f"/{where}"
        if "/" not in where and _GENERATES_NOT.search(where.lower()):
            return True
        if "/" in where and not _NO_ENDPOINT.fullmatch(path):
            return not _GENERATES.search(path.lower())
    answer = answer_of(row)
    if not isinstance(answer, dict):
        return False
    is_count = answer.keys() == {"input_tokens"}
    return is_count or answer.get("object") in ("list", "embedding")


def body_of(row: LogRow) -> LogRow | None:
    """Return the request's body: a field of the line, or the line itself."""
    for _, found in _found(row, BODY):
        found = _opened(found)
        if isinstance(found, dict) and any(name in found for name in PROMPT):
            return found
    return row if any(name in row for name in PROMPT) else None


def arrival_s(row: LogRow) -> float:
    """Return the arrival, in seconds since some moment. Raises FieldError."""
    for name, found in _found(row, TIME):
        return _seconds(name, found)
    if "delay" in row:
        raise FieldError("a Mooncake trace with texts in place of `hash_ids`")
    raise FieldError("no time of arrival, as timestamp, without which it is not read")


def end_s(row: LogRow, arrived_s: float) -> float | None:
    """Return the end of the answer, None if the line has none. Raises FieldError."""
    for name, found in _found(row, END):
        return _seconds(name, found)
    for name, found in _found(row, DURATION_S):
        return arrived_s + _number(name, found) * DURATION_S[name]
    return None


def session_of(row: LogRow) -> str | None:
    """Return the log's name for the session, None without one."""
    for _, found in _found(row, SESSION):
        is_name = isinstance(found, str | int | float) and not isinstance(found, bool)
        if is_name and found != "":
            return str(found)
    return None


def answer_of(row: LogRow) -> Any:
    """Return the answer, parsed where it is JSON; None without one."""
    return next((_opened(found) for _, found in _found(row, ANSWER)), None)


def usage_of(row: LogRow) -> tuple[int | None, int | None]:
    """Return input and output tokens as the server counted them. Raises FieldError."""
    answer = answer_of(row)
    places = [row.get("usage"), answer.get("usage") if isinstance(answer, dict) else 0]
    for usage in [_opened(place) for place in places] + [row]:
        if isinstance(usage, dict):
            prompt, output = _count(usage, INPUT_TOKENS), _count(usage, OUTPUT_TOKENS)
            if output is not None:
                cached = [_count(usage, (name,)) or 0 for name in CACHED_TOKENS]
                return None if prompt is None else prompt + sum(cached), output
    return None, None


def _found(row: LogRow, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not null, in the order of `names`."""
    for name in names:
        value: Any = row
        for part in name.split("."):
            value = _opened(value)
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            yield name, value


def _opened(value: Any) -> Any:
    """Parse the object or array in a string, where there is one."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def _count(usage: LogRow, names: Iterable[str]) -> int | None:
    for name, found in _found(usage, names):
        is_count = isinstance(found, int) and not isinstance(found, bool)
        if not is_count or not 0 <= found <= MOST_TOKENS:
            raise FieldError(f"{name} is no number of tokens")
        return found
    return None


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, str) and not _is_number(value):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise FieldError(
                f"{name} is no time: seconds, or as in 2026-01-31T12:00:00.25Z"
            ) from None
        value = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        return _number(name, value)
    number = _number(name, value)
    return number * next(unit for limit, unit in _UNITS_S if number < limit)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_number(value) or not 0 <= float(value) < 1e20:
        raise FieldError(f"{name} is no time")
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
