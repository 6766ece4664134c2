# SPDX-License-Identifier: Apache-2.0
"""What py-spy writes, as samples with their times.

None of its formats says when a sample was taken. Its Chrome trace says when a thread's
stack was seen to change, counted from an unknown moment. Its log says when the process
was stopped for a sample. Of the first few stops, the one from which all changes come
right after a stop is where the trace begins.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import PurePath

import numpy as np

from lab.records.stacks import Sample, SampledThread

LOGGED = re.compile(r"\[(\S+)Z DEBUG remoteprocess\S*\] (attached to|detached from) ")
THREAD = re.compile(r"thread (\d+)")
ROOT = re.compile(r"thread \((\d+)\)(?:: (.*))?")
# Stops before the first sample: py-spy looks at the process.
MOST_STOPS_BEFORE = 20
# From the end of a stop to the change being noted; more means that nothing fits.
MOST_LAG_NS = 2_000_000
EARLY_NS = 50_000


class NotUnderstood(Exception):
    """py-spy's output is not what is known of it; the message says how."""


@dataclass
class Stop:
    """The process stood still; at `t_ns`, by the wall clock, the last thread did."""

    t_ns: int
    end_ns: int
    tids: set[int]


@dataclass
class Stacks:
    """As in lab.records.stacks, with times of the wall clock."""

    threads: list[SampledThread]
    frames: list[str]
    stacks: list[list[int]]
    samples: list[Sample]


def stops(log: str) -> list[Stop]:
    """All stops that a log of `RUST_LOG=remoteprocess=debug` tells of, in order."""
    found: list[Stop] = []
    attaching = False
    for line in log.splitlines():
        if not (logged := LOGGED.search(line)):
            continue
        t_ns = _unix_ns(logged[1])
        if logged[2] == "attached to":
            if not attaching:
                found.append(Stop(t_ns, t_ns, set()))
            found[-1].tids.add(int(THREAD.search(line)[1]))
            found[-1].t_ns = t_ns
        elif found:
            found[-1].end_ns = t_ns
        attaching = logged[2] == "attached to"
    return found


def _unix_ns(utc: str) -> int:
    whole, _, fraction = utc.partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 10**9 + int(fraction.ljust(9, "0"))


def sampled(trace: bytes, log: str) -> Stacks:
    """All samples of a Chrome trace. Raises NotUnderstood."""
    try:
        events = [one for one in json.loads(trace) if one.get("ph") in ("B", "E")]
    except ValueError as error:
        raise NotUnderstood(f"the trace is no JSON: {error}") from None
    stopped = stops(log)
    if not events or not stopped:
        raise NotUnderstood(
            f"{len(events)} events in the trace and {len(stopped)} stops in the log: "
            "nothing was sampled"
        )
    return _replayed(events, stopped, _stop_of(events, stopped))


def _stop_of(events: list[dict], stopped: list[Stop]) -> np.ndarray:
    """The place in `stopped` of the stop that each event came from, (events,)."""
    ends_ns = np.array([stop.end_ns for stop in stopped])
    ts_ns = np.array([event["ts"] for event in events]) * 1_000
    # What is still open when py-spy ends is closed then, after the last stop.
    seen = np.array([event["ph"] == "B" for event in events])
    best = None
    for first_ns in ends_ns[:MOST_STOPS_BEFORE]:
        at_ns = ts_ns - ts_ns[0] + first_ns
        places = np.searchsorted(ends_ns, at_ns + EARLY_NS, "right") - 1
        lag_ns = float(np.median(np.abs(at_ns - ends_ns[places])[seen]))
        if best is None or lag_ns < best[0]:
            best = lag_ns, places
    if best[0] > MOST_LAG_NS:
        raise NotUnderstood(
            f"stacks change {best[0] / 1e6:.1f} ms after py-spy looked at them: it "
            "cannot be told when the samples were taken"
        )
    return best[1]


def _replayed(events: list[dict], stopped: list[Stop], places: np.ndarray) -> Stacks:
    frames: dict[str, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    threads: dict[int, int] = {}
    names: list[SampledThread] = []
    now: dict[int, list[int]] = {}
    changes = {
        place: [event for _, event in group]
        for place, group in groupby(
            zip(places.tolist(), events, strict=True), lambda one: one[0]
        )
    }
    tid_of: dict[int, int] = {}
    samples = []
    for place, stop in enumerate(stopped):
        for event in changes.get(place, ()):
            if root := ROOT.fullmatch(event["name"]):
                tid = tid_of[event["tid"]] = int(root[1])
                if tid not in threads:
                    threads[tid] = len(names)
                    names.append(SampledThread(tid, root[2] or str(tid)))
            tid = tid_of[event["tid"]]
            stack = now.setdefault(tid, [])
            if event["ph"] == "E":
                stack.pop()
            else:
                stack.append(frames.setdefault(_frame(event), len(frames)))
        for tid, stack in now.items():
            # The outermost is the thread itself.
            if tid in stop.tids and len(stack) > 1:
                number = stacks.setdefault(tuple(stack[1:]), len(stacks))
                samples.append(Sample(stop.t_ns, threads[tid], number))
    return Stacks(names, list(frames), [list(stack) for stack in stacks], samples)


def _frame(event: dict) -> str:
    where = event["args"]
    if not where["filename"]:
        return event["name"]
    # Enough of the path to tell two files of one name apart.
    file = "/".join(PurePath(where["filename"]).parts[-2:])
    line = f":{where['line']}" if where["line"] else ""
    return f"{event['name']} ({file}{line})"
