# SPDX-License-Identifier: Apache-2.0
"""Replayers: the processes that send a run's requests, one or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from kvtax.engine.server import tail
from kvtax.proc.supervise import Supervised

from kvtax_fleet.experiment.config import Experiment
from kvtax_fleet.replay.shares import Gate, merge

RECORDS, LOG = "replay.jsonl", "replay.log"
# Folder below a run's folder, with a folder for each of several replayers.
SHARES = "replayers"
# Exit codes of `kvtax fleet replay` after a replay that reached its end: all went well,
# or a request failed or was late, which kvtax_fleet.analyze.refusals judges.
REPLAYED = (0, 3)
# Time for the start to reach all of several replayers.
LEAD_NS = 2_000_000_000

# Returns None while any replayer runs, then the worst of their exit statuses.
Status = Callable[[], int | None]


class ReplayerError(Exception):
    """A replayer came to nothing; the message says why."""

    exit_code = 3


class Work(msgspec.Struct, frozen=True):
    """The load of one replayer; without a `share` it is the only one."""

    url: str
    vocab_size: int
    in_flight: int
    share: tuple[int, int] | None = None


def shares(whole: Work, replayers: int) -> list[Work]:
    """Divide the work among so many replayers."""
    if replayers == 1:
        return [whole]
    slots, rest = divmod(whole.in_flight, replayers)
    return [
        msgspec.structs.replace(
            whole, in_flight=slots + (number < rest), share=(number, replayers)
        )
        for number in range(replayers)
    ]


class Replayer:
    """A replayer process with records, log and gate in `folder`."""

    def __init__(
        self, experiment: Experiment, trace: Path, work: Work, folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvtax", "fleet", "replay"]
        command += ["--url", work.url]
        command += ["--trace", str(trace), "--out", str(folder / RECORDS)]
        command += ["--vocab-size", str(work.vocab_size)]
        command += ["--time-scale", str(experiment.time_scale)]
        command += ["--timeout", str(experiment.request_timeout_s)]
        command += ["--lag-budget-ms", str(experiment.lag_budget_ms)]
        command += ["--max-inflight-sessions", str(work.in_flight)]
        if not experiment.open_loop:
            command += ["--closed-loop"]
        if work.share is not None:
            number, replayers = work.share
            command += ["--share", f"{number}/{replayers}", "--gate", str(folder)]
        self.gate = Gate(folder)
        self._log = folder / LOG
        self._process = Supervised(command, dict(os.environ), self._log)

    def status(self) -> int | None:
        """Return the exit code, None while it runs. Raises ReplayerError."""
        status = self._process.poll()
        if status is not None and status not in REPLAYED:
            end = tail(self._log)
            raise ReplayerError(f"the replayer ended with status {status}\n{end}")
        return status

    def stop(self) -> None:
        """End the process."""
        self._process.stop()


def share_folder(folder: Path, work: Work) -> Path:
    """Name the folder of a replayer's files below a run's folder."""
    return folder if work.share is None else folder / SHARES / str(work.share[0])


def worst(statuses: Sequence[int | None]) -> int | None:
    """Return the worst exit status, None if a replayer runs."""
    known = [status for status in statuses if status is not None]
    return max(known) if len(known) == len(statuses) else None


def merge_shares(folder: Path, replayers: int) -> None:
    """Merge the records of several replayers into the run's one file.

    Raises RecordsError.
    """
    if replayers == 1:
        return
    parts = [folder / SHARES / str(number) / RECORDS for number in range(replayers)]
    merge(parts, folder / RECORDS)
    for share in parts:
        share.unlink()
        Gate(share.parent).remove()
