# SPDX-License-Identifier: Apache-2.0
"""`kvtax fleet replay`: one replay over HTTP, and its summary."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from kvtax.load import allow_open_files
from kvtax.load.alarm import Alarm
from kvtax.load.client import Ledger, Stop, open_session
from kvtax.records.requests import ReplayEnd

from kvtax_fleet.cli.options import fields_of
from kvtax_fleet.replay.http_link import (
    Bodies,
    HttpLink,
    ReplayClient,
    check_lengths,
    check_vocabulary,
    find_model,
)
from kvtax_fleet.replay.options import Options, ReplayError
from kvtax_fleet.replay.play import Player
from kvtax_fleet.replay.sessions import Session, group, new_ledger
from kvtax_fleet.trace import read_trace
from kvtax_fleet.trace.trace_file import require_file


class Replay:
    """A replay of a trace over HTTP, with a record of every request in `out`.

    Raises ReplayError.
    """

    records: Ledger
    player: Player

    def __init__(self, options: Options, sessions: list[Session], out: Path) -> None:
        self.options = options
        self.sessions = sessions
        self.scheduled = sum(len(session.turns) for session in self.sessions)
        self.out = out
        self.stop = Stop()

    async def execute(self, **header: Any) -> ReplayEnd:
        """Run to the end, or to SIGINT or SIGTERM; return the end line.

        Raises ReplayError if it cannot begin, FileExistsError if `out` exists, OSError
        if it cannot be written.
        """
        url = self.options.url
        check_vocabulary(self.sessions, self.options.vocab_size)
        async with open_session() as http:
            model = await find_model(http, url, self.options.model)
            check_lengths(self.sessions, model)
            client = ReplayClient(http, url, self.options.timeout_s)
            header |= {"model": model.id, "max_model_len": model.max_model_len}
            header |= {"scheduled": self.scheduled, "sessions": len(self.sessions)}
            allow_open_files()
            with (
                Bodies(model.id, self.options.vocab_size) as bodies,
                Alarm() as alarm,
                new_ledger(self.out, self.options, **header) as self.records,
            ):
                link = HttpLink(client, bodies, alarm)
                self.player = Player(self.options, self.sessions, link, self.records)
                return await self._recorded()

    async def _recorded(self) -> ReplayEnd:
        """Play everything and close the records, however the playing ends."""
        # The trace stays: a full collection would walk it while requests are due.
        gc.freeze()
        work = asyncio.create_task(self.player.play())
        self.stop.cancels(work)
        flushing = asyncio.create_task(self.records.flush_forever())
        flushing.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            pass  # requests without an answer are recorded below
        finally:
            self.player.cancel_rest()
        flushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flushing
        stopped = self.stop.received is not None
        return self.player.end(stopped, replay_cpu_s=self.records.cpu_s)


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
    sessions = group(read_trace(options.trace), options.request_limit)
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
