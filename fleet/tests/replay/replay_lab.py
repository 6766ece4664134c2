# SPDX-License-Identifier: Apache-2.0
"""Traces to replay, the replayer as a process, and what must hold for any replay."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from kvtax.paths import REPOSITORY
from tests.harness.forked import Forked
from tests.proc.living import eventually

from kvtax_fleet.replay.options import Options
from kvtax_fleet.replay.replayer import Replay
from kvtax_fleet.replay.sessions import group
from kvtax_fleet.trace import Request, trace_file

BLOCK_TOKENS = 16


def trace(
    sessions: int,
    turns: int = 2,
    *,
    gap_s: float = 0.01,
    think_s: float = 0.01,
    input_tokens: int = 40,
    output_tokens: int = 3,
) -> list[Request]:
    """Sessions that grow by `input_tokens` per turn and share no block."""
    requests = []
    for session in range(sessions):
        for turn in range(turns):
            tokens = input_tokens * (turn + 1)
            first = session * 10_000
            blocks = -(-tokens // BLOCK_TOKENS)
            request = Request(
                arrival_s=session * gap_s + turn * think_s,
                session=f"s{session}",
                turn=turn,
                input_tokens=tokens,
                output_tokens=output_tokens,
                hashes=list(range(first, first + blocks)),
                block_tokens=BLOCK_TOKENS,
                think_s=think_s if turn else None,
            )
            requests.append(request)
    return sorted(requests, key=lambda request: request.arrival_s)


def write_trace(path: Path, requests: list[Request]) -> Path:
    trace_file.write_trace(path, {"requests": len(requests)}, requests)
    return path


class Lines:
    """What a replay wrote; `end` is None where it was killed."""

    def __init__(self, out: Path) -> None:
        *whole, torn = out.read_bytes().split(b"\n")
        self.torn = torn
        self.header, *rest = map(json.loads, whole)
        self.end = rest.pop() if rest and rest[-1]["type"] == "end" else None
        self.records = rest

    def having(self, status: str) -> list[dict]:
        return [record for record in self.records if record["status"] == status]

    def sessions(self) -> dict[str, list[dict]]:
        """The records of each session, in the order they were written."""
        seen = defaultdict(list)
        for record in self.records:
            seen[record["session"]].append(record)
        return seen


def assert_accounted_for(lines: Lines, requests: list[Request]) -> None:
    """One terminal record per request, in order, and never a turn after a bad one."""
    ids = [record["id"] for record in lines.records]
    assert sorted(ids) == sorted(f"{r.session}/{r.turn}" for r in requests)
    assert lines.end["scheduled"] == lines.header["scheduled"] == len(requests)
    for status in ("ok", "failed", "cancelled"):
        assert lines.end[status] == len(lines.having(status))
    for records in lines.sessions().values():
        turns = [record["turn"] for record in records]
        assert turns == sorted(turns)
        statuses = [record["status"] for record in records]
        sent = [record["sent_ns"] is not None for record in records]
        for before, after in pairwise(zip(statuses, sent, strict=True)):
            assert before[0] == "ok" or after == ("cancelled", False)
    for record in lines.records:
        assert (record["error"] is None) == (record["status"] == "ok")


def assert_closed_loop_inside(
    lines: Lines, requests: list[Request], time_scale: float
) -> None:
    """Every turn is due when the answer before it has ended and the think time passed,
    and is not sent sooner."""
    think_s = {f"{r.session}/{r.turn}": r.think_s for r in requests}
    for records in lines.sessions().values():
        for before, after in pairwise(records):
            if after["intended_ns"] is not None:
                think_ns = int(think_s[after["id"]] / time_scale * 1e9)
                assert after["intended_ns"] == before["end_ns"] + think_ns
    for record in lines.records:
        stamps = ["intended_ns", "sent_ns", "first_token_ns", "end_ns"]
        reached = [record[stamp] for stamp in stamps if record[stamp] is not None]
        assert reached == sorted(reached)
        if record["status"] == "ok":
            assert len(reached) == len(stamps)


def replay_here(
    url: str, requests: list[Request], out: Path, **options: object
) -> Lines:
    """Replay in this process, which Ctrl-C then no longer ends until it is over."""
    out.unlink(missing_ok=True)
    settings = Options(url, "here", **options)
    asyncio.run(Replay(settings, group(requests), out).execute())
    return Lines(out)


class ReplayProcess:
    """A replayer under way."""

    def __init__(self, url: str, trace: Path, out: Path, *options: str) -> None:
        self.out = out
        command = [sys.executable, "-m", "kvtax", "fleet", "replay"]
        command += ["--url", url]
        command += ["--trace", str(trace), "--out", str(out), *options]
        self.process = Forked(
            command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        )

    def wait_for_records(self, n: int) -> None:
        """Return once `n` requests have ended and are on disk."""

        def ended() -> bool:
            written = self.out.exists() and self.out.read_bytes().count(b'"request"')
            assert self.process.poll() is None, self.process.stderr.read()
            return written >= n

        eventually(ended)

    def finish(self) -> tuple[int, str]:
        """Its exit status and what it said."""
        _, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stderr
