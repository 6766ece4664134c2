# SPDX-License-Identifier: Apache-2.0
"""`kvtax fleet replay`: send a trace, print a summary."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
import sys

import msgspec
from kvtax.records.requests import ReplayEnd

from kvtax_fleet.cli.options import fields_of
from kvtax_fleet.replay.options import Options, ReplayError
from kvtax_fleet.replay.replayer import Replay
from kvtax_fleet.replay.sessions import group
from kvtax_fleet.trace import read_trace
from kvtax_fleet.trace.trace_file import require_file

# Exit code of a replay with a failed or cancelled request, or with late requests.
NOT_VALID = 3
BY_SIGNAL = 128


def run(arguments: argparse.Namespace) -> int:
    """Replay and return the exit code.

    Raises OptionsError, ReplayError and TraceError before anything is sent; OSError if
    the records cannot be written.
    """
    options = fields_of(arguments, Options)
    url = options.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ReplayError(f"--url {url}: must begin with http:// or https://")
    if options.closed_loop and options.max_inflight_sessions is None:
        raise ReplayError("--closed-loop: give --max-inflight-sessions, too")
    if options.closed_loop and options.trace_times:
        raise ReplayError("--trace-times: leave --closed-loop out, which has no times")
    options = msgspec.structs.replace(options, url=url)
    require_file(options.trace)  # hashed, too
    sessions = group(read_trace(options.trace))
    replay = Replay(options, sessions, arguments.out)
    try:
        return asyncio.run(_replay(replay))
    except FileExistsError:
        raise ReplayError(
            f"--out {arguments.out}: exists; records are never overwritten"
        ) from None


async def _replay(replay: Replay) -> int:
    with open(replay.options.trace, "rb") as trace:
        digest = hashlib.file_digest(trace, "sha256").hexdigest()
    end = await replay.execute(trace_sha256=digest)
    print(summary(end), file=sys.stderr)
    if (number := replay.stop.received) is not None:
        print(f"replay: stopped by {signal.Signals(number).name}", file=sys.stderr)
        return BY_SIGNAL + number
    return 0 if end.valid and not end.failed and not end.cancelled else NOT_VALID


def summary(end: ReplayEnd) -> str:
    """Read from the end line how the replay ended."""
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
