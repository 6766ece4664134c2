# SPDX-License-Identifier: Apache-2.0
"""The processes that send a run's requests: one, or several with a share each."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from fleet.experiment.config import Experiment
from fleet.replay.gate import Gate
from fleet.replay.merge import merge
from lab.serving.server import tail
from lab.serving.supervise import Supervised

RECORDS, LOG = "replay.jsonl", "replay.log"
# Below a run's folder: a folder for each of several.
SHARES = "replayers"
# fleet.replay's: all went well, a request failed, requests were sent late. What that
# means for a comparison is for fleet.analyze.refusals to say.
REPLAYED = (0, 2, 3)
# Until all of several have heard when to begin.
LEAD_NS = 2_000_000_000

# None while any of them runs; then the worst of their exit statuses.
Status = Callable[[], int | None]


class ReplayerError(Exception):
    """A replayer came to nothing; the message says why."""


class Work(msgspec.Struct, frozen=True):
    """What one replayer is to do; without a `share` it is the only one."""

    url: str
    vocab_size: int
    in_flight: int
    share: tuple[int, int] | None = None


def shared_out(whole: Work, replayers: int) -> list[Work]:
    """The work of each of so many."""
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
    """A process that does its work, with records, log and gate in `folder`."""

    def __init__(
        self, experiment: Experiment, trace: Path, work: Work, folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fleet.replay", "--url", work.url]
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
        """None while it runs. Raises ReplayerError if it ended and has not replayed."""
        status = self._process.poll()
        if status is not None and status not in REPLAYED:
            end = tail(self._log)
            raise ReplayerError(f"the replayer ended with status {status}\n{end}")
        return status

    def stop(self) -> None:
        self._process.stop()


@contextmanager
def replaying_here(
    experiment: Experiment, trace: Path, works: list[Work], folder: Path
) -> Iterator[Status]:
    """Replayers on this host. What is yielded raises ReplayerError."""
    with ExitStack() as stack:
        replayers = []
        for work in works:
            own = share_folder(folder, work)
            replayers.append(Replayer(experiment, trace, work, own))
            stack.callback(replayers[-1].stop)
        waiting = len(works) > 1

        def status() -> int | None:
            nonlocal waiting
            if waiting and all(one.gate.ready for one in replayers):
                start_ns = time.perf_counter_ns() + LEAD_NS
                for one in replayers:
                    one.gate.open(start_ns)
                waiting = False
            return worst([one.status() for one in replayers])

        yield status


def share_folder(folder: Path, work: Work) -> Path:
    """Where in a run's folder a replayer has its files."""
    return folder if work.share is None else folder / SHARES / str(work.share[0])


def worst(statuses: list[int | None]) -> int | None:
    return None if None in statuses else max(statuses)


def merge_shares(folder: Path, replayers: int) -> None:
    """Put the records of several into the one file that a run's folder has.

    Raises RecordsError.
    """
    if replayers == 1:
        return
    shares = [folder / SHARES / str(number) / RECORDS for number in range(replayers)]
    merge(shares, folder / RECORDS)
    for share in shares:
        share.unlink()
        Gate(share.parent).remove()
