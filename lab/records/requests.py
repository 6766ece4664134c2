# SPDX-License-Identifier: Apache-2.0
"""requests.jsonl: what became of every request of a trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lab.records import RecordsError
from lab.records.lines import read_lines
from lab.records.outcome import Account, Outcome


class RequestsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.requests/1"
):
    """Header; written by the driver before the first request."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    plan: Any = None
    """What was to be sent: `lab/load/plan.py`."""
    scheduled: int
    """Number of requests of the plan."""


class PhaseStart(msgspec.Struct, omit_defaults=True, tag_field="type", tag="phase"):
    """Start of a phase."""

    name: str
    """`growth`, `plateau` or `after_reset`."""
    start_ns: int
    """When its first request may be due."""
    reset_ns: int | None = None
    """When `/reset_prefix_cache` answered OK; of `after_reset` only."""


class RequestRecord(Outcome, tag_field="type", tag="request"):
    """What became of one scheduled request; a moment that never came is null."""

    id: int
    """Counts from 0 in the order of the plan; sent as `X-Request-Id`."""
    phase: str
    """The phase that it belongs to."""
    prompt_tokens: int
    """Tokens of the prompt."""
    output_tokens: int | None = None
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
    if lines.header is None:
        raise RecordsError(f"{path}:1: no header line")
    records = lines.records
    ends = [record for record in records if isinstance(record, DriverEnd)]
    return Requests(
        scheduled=lines.header.scheduled,
        phases=[record for record in records if isinstance(record, PhaseStart)],
        requests=[record for record in records if isinstance(record, RequestRecord)],
        end=ends[-1] if ends else None,
        torn_lines=lines.torn_lines,
    )
