# SPDX-License-Identifier: Apache-2.0
"""One replay.jsonl from those of replayers that had a share of the sessions each."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleet.replay.options import Options
from fleet.replay.records import STOPPED
from fleet.replay.window import steady_window
from lab.load.ledger import lag_summary
from lab.records import RecordsError
from lab.records.lines import Lines, read_lines
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader, Steady


def merge(shares: list[Path], out: Path) -> None:
    """Write `out`, as one replayer would have written it; all times are by one clock.

    The steady window is that of all sessions. Without the end of a share there is no
    end: a replayer was killed. Raises RecordsError.
    """
    lines_of = ReplayedRequest | ReplayEnd
    read = [read_lines(path, ReplayHeader, lines_of) for path in shares]
    records = [one for share in read for one in share.records]
    requests = [one for one in records if isinstance(one, ReplayedRequest)]
    ends = [one for one in records if isinstance(one, ReplayEnd)]
    requests.sort(key=lambda one: (one.end_ns is None, one.end_ns or 0))
    lines: list[msgspec.Struct] = [_header(shares, read), *requests]
    if len(ends) == len(shares):
        lines.append(_end(ends, requests))
    encoded = msgspec.json.Encoder().encode_lines(lines)
    with out.open("xb") as file:
        file.write(encoded)


def _header(shares: list[Path], read: list[Lines[ReplayHeader]]) -> ReplayHeader:
    for path, share in zip(shares, read, strict=True):
        if share.header is None:
            raise RecordsError(f"{path}:1: no header line")
    headers = [share.header for share in read]
    options = [msgspec.convert(one.options, Options) for one in headers]
    slots = [one.max_inflight_sessions for one in options]
    whole = msgspec.structs.replace(
        options[0],
        share=None,
        max_inflight_sessions=None if None in slots else sum(slots),
    )
    return msgspec.structs.replace(
        headers[0],
        load=whole.load,
        options=whole,
        scheduled=sum(one.scheduled for one in headers),
        sessions=sum(one.sessions for one in headers),
        replayers=len(headers),
    )


def _end(ends: list[ReplayEnd], requests: list[ReplayedRequest]) -> ReplayEnd:
    lag_ms = lag_summary(
        [
            (one.sent_ns - one.intended_ns) / 1e6
            for one in requests
            if one.sent_ns is not None
        ]
    )
    budget_ms = ends[0].lag_budget_ms
    stopped = any(one.error == STOPPED for one in requests)
    steady = None if stopped else steady_window(_spans(requests), warmup_ns=0)
    return ReplayEnd(
        scheduled=sum(one.scheduled for one in ends),
        ok=sum(one.ok for one in ends),
        failed=sum(one.failed for one in ends),
        cancelled=sum(one.cancelled for one in ends),
        lag_ms=lag_ms,
        lag_budget_ms=budget_ms,
        valid=lag_ms is not None and lag_ms["p99"] <= budget_ms,
        steady=steady and Steady(*steady),
        held_sessions=sum(one.held_sessions for one in ends),
        held_s_max=max(one.held_s_max for one in ends),
        replay_cpu_s=sum(one.replay_cpu_s or 0.0 for one in ends),
    )


def _spans(requests: list[ReplayedRequest]) -> list[tuple[int, int]]:
    """When each session began and ended."""
    spans: dict[str, tuple[int, int]] = {}
    for one in requests:
        if one.sent_ns is None or one.end_ns is None:
            continue
        begin_ns, end_ns = spans.get(one.session, (one.intended_ns, one.end_ns))
        spans[one.session] = min(begin_ns, one.intended_ns), max(end_ns, one.end_ns)
    return list(spans.values())
