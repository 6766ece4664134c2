# SPDX-License-Identifier: Apache-2.0
"""A trace holds every step and request of its window, and nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from kvtax.look.discover import common_clock, discover
from kvtax.look.perfetto import COUNTERS
from tests.look.conftest import main
from tests.look.made_up_server import FIRST_NS, Server, served

Slices = dict[str, list[tuple[str, int, int]]]


def traced(folder: Path, *options: str) -> Trace:
    """Raises DecodeError if the file does not follow the schema."""
    path = folder / "trace.pftrace"
    page = str(folder / "page.html")
    assert main([str(folder), "--out", page, "--perfetto", str(path), *options]) == 0
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def read_back(trace: Trace) -> tuple[Slices, dict[str, list[tuple[int, int]]]]:
    """Slices (name, begin, end) and counters by track, told apart by a stack each."""
    names, processes = {}, {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            processes[track.uuid] = track.process.process_name or track.name
            parent = processes.get(track.parent_uuid)
            names[track.uuid] = f"{parent}/{track.name}" if parent else track.name
    slices, counters = defaultdict(list), defaultdict(list)
    stacks = defaultdict(list)
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event, name = packet.track_event, names[packet.track_event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stacks[name].append((event.name, packet.timestamp))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            slices[name].append((*stacks[name].pop(), packet.timestamp))
        else:
            counters[name].append((packet.timestamp, event.counter_value))
    assert not any(stacks.values())
    return slices, counters


def own(tracks: dict, process: str = "records (vLLM 0.18.1)") -> dict:
    start = f"{process}/"
    return {
        name.removeprefix(start): track
        for name, track in tracks.items()
        if name.startswith(start)
    }


def test_every_step_and_call_is_a_slice_as_long_as_it_took(tmp_path):
    server = served(tmp_path / "records", steps=120)
    slices = own(read_back(traced(server.write()))[0])
    steps = {name: (begin, end) for name, begin, end in slices["steps"]}
    assert len(steps) == len(slices["steps"]) == 120
    for step in server.steps:
        begin, end = steps[f"step {step['step_id']}"]
        assert begin == step["t_ns"]
        # In the table a time is a float32.
        assert end == pytest.approx(server.ends_ns(step["step_id"]), abs=500)
    for track, records, method in (
        ("scheduler.build_connector_meta", server.steps, "build_connector_meta"),
        ("worker.get_finished", server.workers, "get_finished"),
    ):
        drawn_us = sum(end - begin for _, begin, end in slices[track]) / 1e3
        truth = sum(record["connector_self_us"][method] for record in records)
        assert drawn_us == pytest.approx(truth, rel=1e-5)
    assert Counter(name for name, *_ in slices["scheduler"]) == {
        "schedule()": 120,
        "update_from_output()": 120,
    }
    assert len(slices["worker"]) == 120


def test_counters_are_those_of_the_steps(tmp_path):
    server = served(tmp_path / "records", steps=60)
    counters = own(read_back(traced(server.write()))[1])
    for column, name in COUNTERS.items():
        truth = [(step["t_ns"], step[column]) for step in server.steps]
        assert counters[name] == truth


def test_a_request_has_a_track_from_its_arrival_to_its_end(tmp_path):
    server = served(tmp_path / "records", steps=200)
    slices = own(read_back(traced(server.write()))[0])
    for request in server.requests:
        drawn = slices[f"request {request['id']}"]
        assert min(begin for _, begin, _ in drawn) == request["arrival_ns"]
        last = server.ends_ns(request["last_step"])
        assert max(end for *_, end in drawn) == pytest.approx(last, abs=500)
        names = Counter(name for name, *_ in drawn)
        assert names["queued"] == names["first token"] == names["further tokens"] == 1
        assert names["waiting for KV"] == bool(request.get("kv_wait_ns"))
        assert names["preempted"] == bool(request.get("preempted_steps"))


def test_a_window_holds_what_has_a_part_in_it(tmp_path):
    server = served(tmp_path / "records", steps=300)
    trace = traced(server.write(), "--from-s", "0.2", "--to-s", "0.4")
    slices = own(read_back(trace)[0])
    first, last = FIRST_NS + 200_000_000, FIRST_NS + 400_000_000
    zero = server.steps[0]["t_ns"] - FIRST_NS
    wanted = {
        f"step {step['step_id']}"
        for step in server.steps
        if step["t_ns"] - zero <= last
        and server.ends_ns(step["step_id"]) - zero >= first
    }
    assert {name for name, *_ in slices["steps"]} == wanted
    assert 0 < len(wanted) < 300


def test_too_many_steps_for_a_browser_ask_for_a_window(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kvtax.look.perfetto.MOST_STEPS", 100)
    folder = served(tmp_path / "records", steps=101).write()
    options = ["--out", str(tmp_path / "p.html"), "--perfetto", str(tmp_path / "t")]
    assert main([str(folder), *options]) == 2
    assert "101 steps or more are too many for one trace" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def two_hosts(folder: Path, other: dict) -> Path:
    """Two servers whose first steps begin a second apart, on their hosts' clocks."""
    for name, header in (
        ("a", {"boot_id": "A", "began_ns": 10**9, "began_unix_ns": 10**18}),
        ("b", other),
    ):
        server = Server(folder / name, now_us=1e6 if name == "b" else 0)
        for _ in range(3):
            server.step()
        server.header |= header
        server.write()
    return folder


@pytest.mark.parametrize(
    ("other", "apart_s", "kinds"),
    [
        ({"boot_id": "A"}, 1.0, []),
        # Its clock began 5 s later, at the same moment by the wall clock.
        (
            {"boot_id": "B", "began_ns": 6 * 10**9, "began_unix_ns": 10**18},
            -4.0,
            ["other_hosts"],
        ),
        ({}, 1.0, ["unknown_clock"]),
    ],
)
def test_two_hosts_are_aligned_by_their_wall_clocks(tmp_path, other, apart_s, kinds):
    discovered, _ = discover(two_hosts(tmp_path, other))
    clock = common_clock(discovered)
    assert [warning.kind for warning in clock.warnings] == kinds
    since = {
        source.name: clock.since_zero_ns(source.name, source.first_ns)
        for source in discovered
    }
    assert min(since.values()) == 0
    assert (since["b"] - since["a"]) / 1e9 == pytest.approx(apart_s)
    assert clock.utc.startswith("2001-09-09 ")
