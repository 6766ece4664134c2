# SPDX-License-Identifier: Apache-2.0
"""Reader of py-spy's output: samples with their times.

Its speedscope file has every sample of every thread, and no times. Its log says when
the process was stopped: first to look up the names of threads, then for each sample,
and at the end for samples that are not written any more. It also says when a sample
failed, which is then written for no thread. So the samples of a thread
are the first stops in which it was and which did not fail, in order.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePath

from kvtax.records.stacks import Sample, SampledThread

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
