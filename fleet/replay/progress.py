# SPDX-License-Identifier: Apache-2.0
"""Progress and summary of a replay on the console, with its own send lag."""

from __future__ import annotations

import asyncio
import sys
import time

from fleet.replay.run import Replay
from lab.records.replay import ReplayEnd


async def print_forever(replay: Replay) -> None:
    """Print one line per second on stderr until cancelled."""
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(1.0)
        if not hasattr(replay, "player"):
            continue
        records, elapsed_s = replay.records, time.monotonic() - start_s
        counts = ", ".join(f"{n} {status}" for status, n in records.counts.items())
        print(
            f"{elapsed_s:.0f} s: {counts}, {replay.player.in_flight} in flight of "
            f"{replay.scheduled}; {_lag(records.recent_lag_ms())}",
            file=sys.stderr,
            flush=True,
        )


def summary(end: ReplayEnd) -> str:
    """How the replay ended, from its end line."""
    counts = f"{end.ok} ok, {end.failed} failed, {end.cancelled} cancelled"
    lines = [f"replay: {counts} of {end.scheduled}; {_lag(end.lag_ms)}"]
    if end.steady is None:
        lines.append("replay: no steady window")
    else:
        length_s = (end.steady.end_ns - end.steady.start_ns) / 1e9
        lines.append(f"replay: load steady for {length_s:.1f} s")
    if end.held_sessions:
        lines.append(
            f"replay: {end.held_sessions} sessions waited for a slot, the longest "
            f"{end.held_s_max:.1f} s: the load was not the trace's"
        )
    if not end.valid and end.lag_ms is not None:
        budget = f"budget for p99 {end.lag_budget_ms:g} ms"
        lines.append(f"replay: RUN NOT VALID: requests were sent late, {budget}")
    return "\n".join(lines)


def _lag(lag_ms: dict[str, float] | None) -> str:
    if lag_ms is None:
        return "nothing sent"
    return (
        "lag "
        + ", ".join(f"{name} {value:.2f}" for name, value in lag_ms.items())
        + " ms"
    )
