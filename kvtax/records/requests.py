# SPDX-License-Identifier: Apache-2.0
"""requests.jsonl: the phases of a trial, and the outcome of each of its requests.

Driver and replayer share `RequestOutcome` and `Account`. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtax.records.files import read_lines
from kvtax.records.steps import Natural


class Phase(IntEnum):
    """The cache grows under load, and stays full; then it is filled and held at levels.

    A pass over the levels begins with a reset of the prefix cache.
    """

    GROWTH = 0
    PLATEAU = 1
    FILL = 2
    HOLD = 3

    @property
    def label(self) -> str:
        """The name that plans and request records use."""
        return self.name.lower()

    def at(self, number: int, level: int) -> str:
        """Return the name of the phase at a level of a pass, both from 0."""
        return f"{self.label}.{number}.{level}"

    @classmethod
    def of(cls, name: str) -> Phase | None:
        """Return the phase that a file means by `name`; None for another name."""
        label = name.partition(".")[0]
        return next((phase for phase in cls if phase.label == label), None)


def level_of(name: str) -> int:
    """Return the level in the name of a phase; 0 if it has none."""
    _, _, place = name.partition(".")
    return int(place.split(".")[1]) if "." in place else 0


class RequestOutcome(msgspec.Struct, kw_only=True):
    """RequestOutcome of a request; the sender fills it in step by step."""

    status: Literal["ok", "failed", "cancelled"] | None = None
    """How it ended; no line is written before it has."""
    error: str | None = None
    """Why it is not ok."""
    http_status: int | None = None
    """Of the answer; null if there was none."""
    intended_ns: int | None = None
    """When it was due; null if that never came."""
    sent_ns: int | None = None
    """When the first byte of the body was handed to the socket."""
    first_token_ns: int | None = None
    """First event with tokens."""
    end_ns: int | None = None
    """Last event with tokens; of a request that is not ok, when it was given up."""


class Account(msgspec.Struct, kw_only=True):
    """The sender's own account of a run: its last line, absent if it was killed."""

    scheduled: int
    """Requests that were to be sent."""
    ok: int
    """Requests with a whole answer."""
    failed: int
    """Requests with an error, or without a whole answer."""
    cancelled: int
    """Requests that were given up or never sent."""
    lag_ms: dict[str, float] | None = None
    """`p50`, `p90`, `p99`, `max` of actual less intended send; null if nothing was
    sent."""
    lag_budget_ms: float | None = None
    """What p99 of the lag may be."""
    valid: bool | None = None
    """Whether p99 of the lag is within its budget."""


class RequestsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.requests/1"
):
    """Header; written by the driver before the first request."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    plan: Any = None
    """What was to be sent: `kvtax/load/plan.py`."""
    scheduled: int
    """Number of requests of the plan."""


class PhaseStart(msgspec.Struct, omit_defaults=True, tag_field="type", tag="phase"):
    """Start of a phase."""

    name: str
    """`growth`, `plateau`; `fill.P.L` and `hold.P.L` at level L of pass P."""
    start_ns: int
    """When its first request may be due."""
    reset_ns: int | None = None
    """When `/reset_prefix_cache` answered OK; of the first phase after it only."""


class RequestRecord(RequestOutcome, tag_field="type", tag="request"):
    """RequestOutcome of one scheduled request; a moment that never came is null."""

    id: int
    """Counts from 0 in the order of the plan; sent as `X-Request-Id`."""
    phase: str
    """The phase that it belongs to."""
    prompt_tokens: Natural
    """Tokens of the prompt."""
    output_tokens: Natural | None = None
    """Generated tokens, by the server's usage."""


class DriverEnd(Account, kw_only=True, tag_field="type", tag="end"):
    """The driver's account; the last line, absent if the driver was killed."""

    driver_cpu_s: float | None = None
    """CPU time of the driver from the first request on."""


@dataclass(frozen=True)
class Requests:
    """The content of one requests.jsonl."""

    scheduled: int
    phases: list[PhaseStart]
    requests: list[RequestRecord]
    end: DriverEnd | None
    torn_lines: int


def read_requests(path: Path) -> Requests:
    """Phases, requests and the account of `path`. Raises RecordsError."""
    lines = read_lines(path, RequestsHeader, PhaseStart | RequestRecord | DriverEnd)
    records = lines.records
    ends = [record for record in records if isinstance(record, DriverEnd)]
    return Requests(
        scheduled=lines.header.scheduled,
        phases=[record for record in records if isinstance(record, PhaseStart)],
        requests=[record for record in records if isinstance(record, RequestRecord)],
        end=ends[-1] if ends else None,
        torn_lines=lines.torn_lines,
    )
