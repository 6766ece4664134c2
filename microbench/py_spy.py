# SPDX-License-Identifier: Apache-2.0
"""Sample what a recording server is doing: stacks.<pid>.json beside its steps.

    python -m microbench.py_spy /records --seconds 20

Each sample stops the process for some hundred microseconds, or milliseconds where it
has much native code. So nothing is measured meanwhile; `look` shows shares.

py-spy's speedscope file has every sample of every thread, and no times. Its log says
when the process was stopped: first to look up the names of threads, then for each
sample, and at the end for samples that are not written any more. It also says when a
sample failed, which is then written for no thread. So the samples of a thread are the
first stops in which it was and which did not fail, in order.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePath

import msgspec

from kvtax.engine.server import tail
from kvtax.proc.supervise import Supervised
from kvtax.records import RecordsError
from kvtax.records.files import read_header, write_whole
from kvtax.records.stacks import Sample, SampledStacks, SampledThread
from kvtax.records.steps import EngineHeader, WorkerHeader, only_life
from kvtax.signals import exit_on_signals

# For RUST_LOG: the lines that are looked for.
LOGGED = "remoteprocess=debug,py_spy=warn,py_spy::python_spy=info"
STOP = re.compile(
    r"\[(\S+)Z DEBUG remoteprocess\S*\] (attached to|detached from) thread (\d+)"
)
LOOKED_UP = "looking up thread names"
FAILED = "Failed to get stack trace from"
# The only failure without a stop: see _get_stack_traces in py-spy's python_spy.rs.
NOT_STOPPED = "Failed to suspend process"
ERRORS = re.compile(r"Samples: \d+ Errors: (\d+)")
PLANNED = re.compile(r"Sampling process (\d+) times a second for (\d+) seconds")
THREAD = re.compile(r'Thread (\d+)(?: "(.*)")?')
# What is stopped for and not written: the last sample, and those of the thread that
# samples while the other one ends. Where all planned samples but the last are accounted
# for, there may be more: that one runs on for as long as the other waits for a core.
MOST_UNWRITTEN = 3
# The part of the samples that may have failed: what fails is missing in the shares.
MOST_FAILED = 0.2


class NotUnderstood(Exception):
    """py-spy's output is not what is known of it; the message says how."""


@dataclass
class Stacks:
    """A sample as in kvtax.records.stacks, with times of the wall clock."""

    threads: list[SampledThread] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    stacks: list[list[int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def stops(log: str) -> list[dict[int, int]]:
    """Each stop for a sample, in order: when each thread stood still, in ns, by tid.

    Without those whose sample failed.
    """
    found: list[dict[int, int]] = []
    attaching = False
    for line in log.splitlines():
        if LOOKED_UP in line:
            found[-1:] = []
        elif FAILED in line and NOT_STOPPED not in line:
            # Another thread logs it, maybe while the next stop begins.
            failed = len(found) - (2 if attaching else 1)
            found[failed : failed + 1] = []
        elif told := STOP.search(line):
            if told[2] == "attached to":
                if not attaching:
                    found.append({})
                if found:
                    found[-1][int(told[3])] = _unix_ns(told[1])
            attaching = told[2] == "attached to"
    return found


def _unix_ns(utc: str) -> int:
    whole, _, fraction = utc.partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 10**9 + int(fraction.ljust(9, "0"))


def sampled(speedscope: bytes, log: str) -> Stacks:
    """All samples, in order of time. Raises NotUnderstood."""
    try:
        document = json.loads(speedscope)
        frames = [_frame(frame) for frame in document["shared"]["frames"]]
        profiles = document["profiles"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotUnderstood(f"this is no file of speedscope's: {error!r}") from None
    written = max((len(profile["samples"]) for profile in profiles), default=0)
    counted, failed = ERRORS.search(log), log.count(FAILED)
    if counted is None or int(counted[1]) != failed:
        raise NotUnderstood(
            f"{counted[1] if counted else 'an unknown number of'} samples failed, and "
            f"{failed} are named"
        )
    if failed > MOST_FAILED * (failed + written):
        raise NotUnderstood(
            f"{failed} samples failed, of {failed + written}: try again"
        )
    stopped = stops(log)
    planned = PLANNED.search(log)
    whole = planned and failed + written == int(planned[1]) * int(planned[2]) - 1
    unwritten = len(stopped) - written
    if not written or unwritten < 1 or (unwritten > MOST_UNWRITTEN and not whole):
        raise NotUnderstood(
            f"{written} samples were written, and the process was stopped for "
            f"{len(stopped)}: it cannot be told which is which"
        )
    found = Stacks(frames=frames)
    numbers: dict[tuple[int, ...], int] = {}
    for profile in profiles:
        named = THREAD.fullmatch(profile["name"])
        if named is None:
            raise NotUnderstood(f"a profile is named {profile['name']!r}, as no thread")
        tid = int(named[1])
        found.threads.append(SampledThread(tid, named[2] or str(tid)))
        for t_ns, stack in zip(
            _times(tid, stopped[:written], len(profile["samples"])),
            profile["samples"],
            strict=True,
        ):
            number = numbers.setdefault(tuple(stack), len(numbers))
            found.samples.append(Sample(t_ns, len(found.threads) - 1, number))
    found.stacks = [list(stack) for stack in numbers]
    found.samples.sort(key=lambda sample: sample.t_ns)
    return found


def _times(tid: int, stopped: list[dict[int, int]], samples: int) -> list[int]:
    """When a thread was sampled so often: a thread may begin or end on the way."""
    times = [stop[tid] for stop in stopped if tid in stop]
    if samples > len(times):
        raise NotUnderstood(
            f"thread {tid} has {samples} samples, and stood still {len(times)} times"
        )
    begins_late = bool(stopped) and tid in stopped[-1]
    return times[len(times) - samples :] if begins_late else times[:samples]


def _frame(frame: dict) -> str:
    if not frame.get("file"):
        return frame["name"]
    # Enough of the path to tell two files of one name apart.
    file = "/".join(PurePath(frame["file"]).parts[-2:])
    line = f":{frame['line']}" if frame.get("line") else ""
    return f"{frame['name']} ({file}{line})"


# Each sample stops the process, for up to 10 ms where there are ten threads.
RATE_HZ = 25
# What py-spy takes to begin, and to find the symbols of native code.
GRACE_S = 60.0


class SamplingError(Exception):
    """A process could not be sampled; the message says why."""


def processes(folder: Path) -> list[int]:
    """Find the engine and the workers whose records are in `folder`, each once.

    Raises RecordsError if there are none, or one does not say which process it is.
    """
    kinds: dict[str, type[EngineHeader | WorkerHeader]] = {
        "engine_step*.jsonl": EngineHeader,
        "worker_step*.jsonl": WorkerHeader,
    }
    found = [
        (path, read_header(path, kind).pid)
        for pattern, kind in kinds.items()
        for path in sorted(folder.glob(pattern))
    ]
    if not found:
        raise RecordsError(
            f"{folder}: no engine_step.jsonl: give the folder to which a server writes "
            "its records now, and send it a request first"
        )
    for path, pid in found:
        if pid is None:
            raise RecordsError(f"{path}: its header names no process")
    return sorted({pid for _, pid in found if pid is not None})


class Sampler:
    """py-spy on each of `pids`, from now on for `seconds`; a context that ends it.

    `result` waits for that, and writes the files into `folder`.
    """

    def __init__(self, pids: list[int], folder: Path, seconds: float) -> None:
        self._folder = folder
        self._pids = pids
        self._seconds = math.ceil(seconds)
        self._running: dict[int, Supervised] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Sampler:
        for pid in self._pids:
            log = self._log(pid)
            log.unlink(missing_ok=True)
            # The log says when each sample was taken.
            env = os.environ | {"RUST_LOG": LOGGED}
            self._running[pid] = self._stack.enter_context(
                Supervised(self._command(pid), env, log)
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for pid in self._pids:
            self._samples(pid).unlink(missing_ok=True)

    def result(self) -> list[Path]:
        """Return the files. Raises SamplingError."""
        deadline_s = time.monotonic() + self._seconds + GRACE_S
        return [self._result(pid, deadline_s) for pid in self._pids]

    def _result(self, pid: int, deadline_s: float) -> Path:
        running, log = self._running[pid], self._log(pid)
        while (status := running.poll()) is None:
            if time.monotonic() > deadline_s:
                raise SamplingError(f"py-spy did not end\n{tail(log)}")
            time.sleep(0.1)
        if status != 0 or not self._samples(pid).exists():
            raise SamplingError(
                f"py-spy cannot sample process {pid}: run as its user, and as root "
                f"where ptrace is restricted\n{tail(log)}"
            )
        try:
            found = sampled(self._samples(pid).read_bytes(), log.read_text())
        except NotUnderstood as error:
            raise SamplingError(f"{log}: {error}") from None
        since_boot_ns = time.time_ns() - time.perf_counter_ns()
        for sample in found.samples:
            sample.t_ns -= since_boot_ns
        document = SampledStacks(
            pid=pid,
            rate_hz=RATE_HZ,
            py_spy=importlib.metadata.version("py-spy"),
            **vars(found),
        )
        path = self._folder / f"stacks.{pid}.json"
        write_whole(path, msgspec.json.encode(document))
        log.unlink()
        return path

    def _command(self, pid: int) -> list[str]:
        command = [str(Path(sys.executable).with_name("py-spy")), "record"]
        command += ["--pid", str(pid), "--duration", str(self._seconds)]
        command += ["--rate", str(RATE_HZ), "--format", "speedscope"]
        # Who waits is what is looked for. Functions, not each of their lines.
        command += ["--idle", "--threads", "--native", "--function"]
        return [*command, "--output", str(self._samples(pid))]

    def _samples(self, pid: int) -> Path:
        return self._folder / f"py_spy.{pid}.json"

    def _log(self, pid: int) -> Path:
        return self._folder / f"py_spy.{pid}.log"


def main() -> int:
    """Exit status 0, or 1 with a message if nothing could be sampled."""
    parser = argparse.ArgumentParser(
        prog="python -m microbench.py_spy", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the server writes its records")
    parser.add_argument("--seconds", type=float, default=20.0, help="default: 20")
    chosen = parser.parse_args()
    exit_on_signals()
    try:
        if chosen.seconds <= 0:
            raise SamplingError(f"--seconds {chosen.seconds:g}: must be above 0")
        life = only_life(chosen.folder)
        with Sampler(processes(life), life, chosen.seconds) as sampler:
            written = sampler.result()
    except (RecordsError, SamplingError) as error:
        print(f"py_spy: {error}", file=sys.stderr)
        return 1
    print(f"wrote {', '.join(map(str, written))}")
    print(f"kvtax look {chosen.folder} shows them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
