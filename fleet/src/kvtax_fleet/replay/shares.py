# SPDX-License-Identifier: Apache-2.0
"""Several replayers of one trace: they begin at one moment, and leave one replay.jsonl.

They wait at a gate, which is a folder. A replayer puts `ready` into it once it can
begin. The experiment then puts `start` there, with the time of CLOCK_MONOTONIC at which
the replay begins, in ns.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from kvtax.load.ledger import lag_summary
from kvtax.records.files import read_lines, write_whole
from kvtax.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader, Steady

from kvtax_fleet.replay.options import Options
from kvtax_fleet.replay.sessions import STOPPED, steady_window

LOOK_EVERY_S = 0.01


class Gate:
    """The gate in an existing `folder`."""

    def __init__(self, folder: Path) -> None:
        self._ready, self._start = folder / "ready", folder / "start"

    @property
    def ready(self) -> bool:
        """Return whether the replayer can begin."""
        return self._ready.exists()

    def open(self, start_ns: int) -> None:
        """Let the replayer begin at this time."""
        write_whole(self._start, str(start_ns).encode())

    def remove(self) -> None:
        """Remove the files, once no replayer waits."""
        self._ready.unlink()
        self._start.unlink()

    async def start_ns(self) -> int:
        """Report that the replayer is ready, and wait for the start."""
        self._ready.touch()
        while not self._start.exists():
            await asyncio.sleep(LOOK_EVERY_S)
        return int(self._start.read_text())


def merge(shares: list[Path], out: Path) -> None:
    """Write `out` as one replayer would have written it; all times are by one clock.

    The steady window is that of all sessions. Without the end of a share there is no
    end: a replayer was killed. Raises RecordsError.
    """
    lines_of = ReplayedRequest | ReplayEnd
    read = [read_lines(path, ReplayHeader, lines_of) for path in shares]
    records = [record for share in read for record in share.records]
    requests = [each for each in records if isinstance(each, ReplayedRequest)]
    ends = [each for each in records if isinstance(each, ReplayEnd)]
    requests.sort(key=lambda each: (each.end_ns is None, each.end_ns or 0))
    headers = [share.header for share in read]
    lines: list[msgspec.Struct] = [_header(headers), *requests]
    if len(ends) == len(shares):
        lines.append(_end(ends, requests))
    encoded = msgspec.json.Encoder().encode_lines(lines)
    with out.open("xb") as file:
        file.write(encoded)


def _header(headers: list[ReplayHeader]) -> ReplayHeader:
    options = [msgspec.convert(each.options, Options) for each in headers]
    slots = [each.max_inflight_sessions for each in options]
    limited = [limit for limit in slots if limit is not None]
    whole = msgspec.structs.replace(
        options[0],
        share=None,
        max_inflight_sessions=sum(limited) if len(limited) == len(slots) else None,
    )
    return msgspec.structs.replace(
        headers[0],
        load=whole.load,
        options=whole,
        scheduled=sum(header.scheduled for header in headers),
        sessions=sum(header.sessions for header in headers),
        replayers=len(headers),
    )


def _end(ends: list[ReplayEnd], requests: list[ReplayedRequest]) -> ReplayEnd:
    lag_ms = lag_summary(
        [
            (request.sent_ns - request.intended_ns) / 1e6
            for request in requests
            if request.sent_ns is not None and request.intended_ns is not None
        ]
    )
    budget_ms = ends[0].lag_budget_ms
    stopped = any(request.error == STOPPED for request in requests)
    steady = None if stopped else steady_window(_spans(requests), warmup_ns=0)
    return ReplayEnd(
        scheduled=sum(end.scheduled for end in ends),
        ok=sum(end.ok for end in ends),
        failed=sum(end.failed for end in ends),
        cancelled=sum(end.cancelled for end in ends),
        lag_ms=lag_ms,
        lag_budget_ms=budget_ms,
        valid=lag_ms is not None
        and budget_ms is not None
        and lag_ms["p99"] <= budget_ms,
        steady=steady and Steady(*steady),
        held_sessions=sum(end.held_sessions for end in ends),
        held_s_max=max(end.held_s_max for end in ends),
        replay_cpu_s=sum(end.replay_cpu_s or 0.0 for end in ends),
    )


def _spans(requests: list[ReplayedRequest]) -> list[tuple[int, int]]:
    """Compute when each session began and ended."""
    spans: dict[str, tuple[int, int]] = {}
    for request in requests:
        if (
            request.sent_ns is None
            or request.end_ns is None
            or request.intended_ns is None
        ):
            continue
        begin_ns, end_ns = spans.get(
            request.session, (request.intended_ns, request.end_ns)
        )
        spans[request.session] = (
            min(begin_ns, request.intended_ns),
            max(end_ns, request.end_ns),
        )
    return list(spans.values())
