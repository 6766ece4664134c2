# SPDX-License-Identifier: Apache-2.0
"""A trace for ui.perfetto.dev: every step and request of a window, on one time line.

A process per instance. Its tracks: steps, schedule() and update_from_output(), the
worker, each method of the connector, the counters, and a track per request.

Where in a step a method was called is not recorded, only for how long: its slice begins
where its side of the step does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import polars as pl
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from kvtax.look.discover import Clock
from kvtax.look.instances import Instance, Steps
from kvtax.look.requests import pairs
from kvtax.records import RecordsError
from kvtax.records.files import written_whole
from kvtax.steps.parts import method_columns

MOST_STEPS = 200_000
SEQUENCE = 1
COUNTERS = {
    "cache_size": "|cache|, blocks",
    "free_blocks": "free blocks",
    "running": "running requests",
    "waiting": "waiting requests",
}


@dataclass(frozen=True)
class Window:
    """Seconds since the first step of all instances."""

    from_s: float
    to_s: float

    def of(
        self, rows: pl.DataFrame, begin: str, end: str, moved_ns: int
    ) -> pl.DataFrame:
        """Select rows with a part in the window; `moved_ns` is added to moments."""
        return rows.filter(
            pl.col(end) + moved_ns >= int(self.from_s * 1e9),
            pl.col(begin) + moved_ns <= int(self.to_s * 1e9),
        )


@dataclass(frozen=True)
class Shown:
    """Part of an instance in the window, and the beginnings of the steps it names."""

    name: str
    vllm_version: str | None
    steps: pl.DataFrame
    requests: pl.DataFrame
    begun_ns: dict[int, int]


class TraceOfRecords:
    """A trace that is made of one instance after the other."""

    def __init__(self, clock: Clock, window: Window) -> None:
        self._clock, self._window = clock, window
        self._shown: list[Shown] = []
        self.steps = 0

    def add(self, instance: Instance) -> None:
        """Add an instance. Raises RecordsError if a browser could not show so many."""
        if not instance.digest.steps:
            return
        moved_ns = self._clock.since_zero_ns(instance.name, 0)
        requests = self._window.of(instance.requests, "arrival_ns", "end_ns", moved_ns)
        named = {*requests["first_step"].drop_nulls()}
        named |= {*requests["preempted_steps"].explode().drop_nulls()}
        steps: list[pl.DataFrame] = []
        begun_ns: dict[int, int] = {}
        for frame in Steps(instance.server):
            own = frame.filter(pl.col("step_id").is_in(sorted(named)))
            begun_ns |= dict(own.select("step_id", "t_ns").iter_rows())
            shown = self._window.of(frame, "t_ns", "end_ns", moved_ns)
            steps.append(shown)
            self.steps += shown.height
            if self.steps > MOST_STEPS:
                raise RecordsError(
                    f"{self.steps:,} steps or more are too many for one trace: choose "
                    f"a window with --from-s and --to-s that has at most {MOST_STEPS:,}"
                )
        self._shown.append(
            Shown(
                instance.name,
                instance.vllm_version,
                pl.concat(steps, how="diagonal_relaxed"),
                requests,
                begun_ns,
            )
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        with written_whole(path) as file:
            trace = _Trace(file)
            for shown in self._shown:
                _Process(trace, shown, self._clock.shift_ns[shown.name]).write()


class _Trace:
    """Writes tracks and what happens on them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._uuids = itertools.count(1)

    def track(self, name: str, parent: int | None = None, counter: bool = False) -> int:
        """Make a new track; without a parent it is a process of its own."""
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        track = packet.track_descriptor
        track.uuid = next(self._uuids)
        if parent is None:
            track.process.pid = track.uuid
            track.process.process_name = name
        else:
            track.name, track.parent_uuid = name, parent
        if counter:
            track.counter.SetInParent()
        self._builder.write_packet(packet)
        return int(track.uuid)

    def slice(
        self,
        track: int,
        name: str,
        begin_ns: int,
        end_ns: int,
        **notes: Any,
    ) -> None:
        event = self._event(track, begin_ns, TrackEvent.TYPE_SLICE_BEGIN)
        event.track_event.name = name
        for key, value in notes.items():
            note = event.track_event.debug_annotations.add()
            note.name = key
            if isinstance(value, str):
                note.string_value = value
            else:
                note.double_value = value
        self._builder.write_packet(event)
        end = self._event(track, max(end_ns, begin_ns), TrackEvent.TYPE_SLICE_END)
        self._builder.write_packet(end)

    def counter(self, track: int, t_ns: int, value: int) -> None:
        event = self._event(track, t_ns, TrackEvent.TYPE_COUNTER)
        event.track_event.counter_value = value
        self._builder.write_packet(event)

    def _event(self, track: int, t_ns: int, kind: int) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.timestamp = t_ns
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet


class _Process:
    """One instance in a trace."""

    def __init__(self, trace: _Trace, instance: Shown, shift_ns: int) -> None:
        self._trace, self._instance, self._steps = trace, instance, instance.steps
        self._shift_ns = shift_ns
        self._process = trace.track(f"{instance.name} (vLLM {instance.vllm_version})")

    def write(self) -> None:
        requests = self._instance.requests
        self._write_steps()
        self._write_methods()
        self._write_counters()
        begun = self._instance.begun_ns
        for request in requests.iter_rows(named=True):
            track = self._trace.track(f"request {request['id']}", self._process)
            for name, begin_ns, end_ns in _stages(request, begun):
                self._slice(track, name, begin_ns, end_ns, **_facts(request))

    def _write_steps(self) -> None:
        lane_of = _lanes(self._steps)
        names = _lane_names(max(lane_of, default=0) + 1)
        lanes = [self._trace.track(name, self._process) for name in names]
        scheduler = self._trace.track("scheduler", self._process)
        worker = self._trace.track("worker", self._process)
        for number, row in enumerate(self._steps.iter_rows(named=True)):
            step, begin_ns = row["step_id"], row["t_ns"]
            counts = {
                name: row[name]
                for name in ("scheduled", "prefill_tokens", "decode_tokens")
                if row[name] is not None
            }
            lane = lanes[lane_of[number]]
            self._slice(lane, f"step {step}", begin_ns, row["end_ns"], **counts)
            for name, first_ns, us in (
                ("schedule()", begin_ns, row["schedule_us"]),
                ("update_from_output()", None, row["update_us"]),
            ):
                if us is not None:
                    long_ns = round(us * 1e3)
                    first_ns = row["end_ns"] - long_ns if first_ns is None else first_ns
                    self._slice(scheduler, name, first_ns, first_ns + long_ns)
            if row["execute_model_us"] is not None:
                long_ns = round(row["execute_model_us"] * 1e3)
                began_ns = row["worker_t_ns"]
                self._slice(worker, "execute_model()", began_ns, began_ns + long_ns)

    def _write_methods(self) -> None:
        for column in method_columns(self._steps):
            called = self._steps.filter(pl.col(column) > 0)
            if not called.height:
                continue
            name = column.removesuffix("_us")
            track = self._trace.track(name, self._process)
            begins = "worker_t_ns" if name.startswith("worker.") else "t_ns"
            for begin_ns, us in called.select(begins, column).iter_rows():
                self._slice(track, name, begin_ns, begin_ns + round(us * 1e3))

    def _write_counters(self) -> None:
        for column, name in COUNTERS.items():
            known = self._steps.select("t_ns", column).drop_nulls()
            if known.height:
                track = self._trace.track(name, self._process, counter=True)
                for t_ns, value in known.iter_rows():
                    self._trace.counter(track, t_ns + self._shift_ns, value)

    def _slice(
        self,
        track: int,
        name: str,
        begin_ns: int,
        end_ns: int,
        **notes: Any,
    ) -> None:
        begin_ns, end_ns = begin_ns + self._shift_ns, end_ns + self._shift_ns
        self._trace.slice(track, name, begin_ns, end_ns, **notes)


def _lanes(steps: pl.DataFrame) -> list[int]:
    """Give each step the first track on which no other step still runs."""
    free_ns: list[int] = []
    lanes = []
    for begin_ns, end_ns in steps.select("t_ns", "end_ns").iter_rows():
        free = (n for n, until_ns in enumerate(free_ns) if until_ns <= begin_ns)
        lane = next(free, len(free_ns))
        free_ns[lane : lane + 1] = [end_ns]
        lanes.append(lane)
    return lanes


def _lane_names(count: int) -> list[str]:
    """Name the tracks of steps: as many as there are steps at once."""
    return ["steps", *(f"steps, {number} at once" for number in range(2, count + 1))]


def _stages(
    request: dict[str, Any], begun: dict[int, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield a request's phases in order: (name, from, to) in ns."""
    arrival_ns, end_ns = request["arrival_ns"], request["end_ns"]
    first_ns = begun.get(request["first_step"], end_ns)
    yield "queued", arrival_ns, first_ns
    for begin_ns, over_ns in pairs(request["kv_wait_ns"], end_ns):
        yield "waiting for KV", begin_ns, end_ns if over_ns is None else over_ns
    if request["first_step"] is None:
        return
    token_ns = end_ns
    if request["ttft_us"] is not None:
        token_ns = arrival_ns + round(request["ttft_us"] * 1e3)
        yield "first token", first_ns, token_ns
        yield "further tokens", token_ns, end_ns
    else:
        yield "no token", first_ns, end_ns
    for left, back in pairs(request["preempted_steps"]):
        if left in begun:
            again_ns = end_ns if back is None else begun.get(back, end_ns)
            yield "preempted", begun[left], again_ns


def _facts(request: dict[str, Any]) -> dict[str, Any]:
    names = (
        *("first_step", "prompt_tokens", "cached_tokens"),
        *("external_tokens", "output_tokens"),
    )
    facts = {name: request[name] for name in names if request[name] is not None}
    us = request.get("e2e.connector_us")
    return facts if us is None else facts | {"connector_us": us}
