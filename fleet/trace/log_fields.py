# SPDX-License-Identifier: Apache-2.0
"""Where the lines of request logs say what, by the names that are common.

A name with a dot is a field of an object. Objects may be JSON in a string, as gateways
write bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

TIME = ("timestamp", "time", "ts", "start_time", "startTime", "started_at")
TIME += ("request_time", "arrival_time", "created_at", "created")
END = ("end_time", "endTime", "ended_at", "finished_at", "completed_at")
DURATION_S = {"duration_s": 1.0, "latency_s": 1.0, "elapsed_s": 1.0}
DURATION_S |= {"duration_ms": 1e-3, "latency_ms": 1e-3, "elapsed_ms": 1e-3}
SESSION = ("session_id", "sessionId", "session", "conversation_id", "thread_id")
SESSION += ("metadata.session_id", "headers.x-session-id", "headers.X-Session-Id")
BODY = ("body", "request_body", "request.body", "request", "payload")
PROMPT = ("messages", "prompt", "input")  # what makes an object a body
ANSWER = ("response_body", "response.body", "response", "answer", "completion")
ANSWER += ("output",)
INPUT_TOKENS = ("prompt_tokens", "input_tokens")
# Anthropic counts these beside its input_tokens.
CACHED_TOKENS = ("cache_read_input_tokens", "cache_creation_input_tokens")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens")

# Seconds since 1970 are below 1e11 until the year 5138.
_UNITS_S = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6), (float("inf"), 1e-9))
Row = dict[str, Any]


class FieldError(ValueError):
    """What a line lacks, or what cannot be read in it."""


def body_of(row: Row) -> Row | None:
    """The request's body: a field of the line, or the line itself."""
    for _, found in _found(row, BODY):
        found = _opened(found)
        if isinstance(found, dict) and any(name in found for name in PROMPT):
            return found
    return row if any(name in row for name in PROMPT) else None


def arrival_s(row: Row) -> float:
    """When the request arrived, in seconds since some moment. Raises FieldError."""
    for name, found in _found(row, TIME):
        return _seconds(name, found)
    raise FieldError(f"no time of arrival: it needs one of {', '.join(TIME)}")


def end_s(row: Row, arrived_s: float) -> float | None:
    """When its answer had ended, None if the line is silent. Raises FieldError."""
    for name, found in _found(row, END):
        return _seconds(name, found)
    for name, found in _found(row, DURATION_S):
        return arrived_s + _number(name, found) * DURATION_S[name]
    return None


def session_of(row: Row) -> str | None:
    """What the log calls its session; None where it does not."""
    return next((str(found) for _, found in _found(row, SESSION) if found != ""), None)


def answer_of(row: Row) -> Any:
    """The answer, parsed where it is JSON; None without one."""
    return next((_opened(found) for _, found in _found(row, ANSWER)), None)


def usage_of(row: Row) -> tuple[int | None, int | None]:
    """Input and output tokens as the server counted them. Raises FieldError."""
    answer = answer_of(row)
    places = [row.get("usage"), answer.get("usage") if isinstance(answer, dict) else 0]
    for usage in [_opened(place) for place in places] + [row]:
        if isinstance(usage, dict):
            prompt, output = _count(usage, INPUT_TOKENS), _count(usage, OUTPUT_TOKENS)
            if output is not None:
                cached = [_count(usage, (name,)) or 0 for name in CACHED_TOKENS]
                return None if prompt is None else prompt + sum(cached), output
    return None, None


def _found(row: Row, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The fields that are there and not null, in the order of `names`."""
    for name in names:
        value: Any = row
        for part in name.split("."):
            value = _opened(value)
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            yield name, value


def _opened(value: Any) -> Any:
    """The object or array in a string, where there is one."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


def _count(usage: Row, names: Iterable[str]) -> int | None:
    for name, found in _found(usage, names):
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
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
        return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    number = _number(name, value)
    return number * next(unit for limit, unit in _UNITS_S if number < limit)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_number(value) or not 0 <= float(value) < 1e20:
        raise FieldError(f"{name} is no time")
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
