# SPDX-License-Identifier: Apache-2.0
"""Several replayers, each with a share of the sessions, do what one would do."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from replay_lab import (
    Lines,
    ReplayProcess,
    assert_accounted_for,
    assert_closed_loop_inside,
    trace,
    write_trace,
)

from fleet.replay.gate import Gate
from fleet.replay.merge import merge
from fleet.standin.process import standin

pytestmark = pytest.mark.slow

REPLAYERS = 3
LEAD_NS = 500_000_000
DEADLINE_S = 120.0
ANY_LAG = ["--lag-budget-ms", "60000"]


def shared(folder: Path, requests: list, *options: str) -> tuple[int, Lines]:
    """When it was to begin, and what the replayers wrote together."""
    path = write_trace(folder / "t.jsonl", requests)
    with standin() as server:
        replayers, gates, outs = [], [], []
        for number in range(REPLAYERS):
            own = folder / str(number)
            own.mkdir()
            gates.append(Gate(own))
            outs.append(own / "replay.jsonl")
            told = ["--share", f"{number}/{REPLAYERS}", "--gate", str(own), *ANY_LAG]
            replayers.append(ReplayProcess(server.url, path, outs[-1], *told, *options))
        deadline = time.monotonic() + DEADLINE_S
        while not all(gate.ready for gate in gates):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        start_ns = time.perf_counter_ns() + LEAD_NS
        for gate in gates:
            gate.open(start_ns)
        for one in replayers:
            code, said = one.finish()
            assert code == 0, said
    merge(outs, folder / "o.jsonl")
    return start_ns, Lines(folder / "o.jsonl")


def test_each_request_is_sent_once_when_one_replayer_would_have_sent_it(tmp_path):
    requests = trace(20, 3, gap_s=0.05, think_s=0.02)
    start_ns, lines = shared(tmp_path, requests)
    assert_accounted_for(lines, requests)
    assert_closed_loop_inside(lines, requests, 1)
    first_s = min(one.arrival_s for one in requests)
    for record in lines.records:
        if record["turn"] == 0:
            after_ns = (record["arrival_s"] - first_s) * 1e9
            assert abs(record["intended_ns"] - start_ns - after_ns) <= 1
    assert lines.header["replayers"] == REPLAYERS
    assert lines.header["options"]["share"] is None
    window = lines.end["steady"]
    assert start_ns <= window["start_ns"] < window["end_ns"]
    ended = [one["end_ns"] for one in lines.records]
    assert all(before <= after for before, after in pairwise(ended))


def test_in_a_closed_loop_all_places_together_are_filled_and_no_more(tmp_path):
    requests = trace(18, 2, think_s=0)
    options = ["--closed-loop", "--max-inflight-sessions", "2"]
    start_ns, lines = shared(tmp_path, requests, *options)
    assert_accounted_for(lines, requests)
    assert lines.header["options"]["max_inflight_sessions"] == 2 * REPLAYERS
    firsts = [one for one in lines.records if one["intended_ns"] == start_ns]
    assert len(firsts) == 2 * REPLAYERS


def test_where_a_replayer_was_killed_the_whole_has_no_end(tmp_path):
    requests = trace(9, 1)
    shared(tmp_path, requests)
    outs = [tmp_path / str(number) / "replay.jsonl" for number in range(REPLAYERS)]
    killed = outs[1].read_text().splitlines(keepends=True)[:-1]
    outs[1].write_text("".join(killed))
    merge(outs, tmp_path / "again.jsonl")
    assert Lines(tmp_path / "again.jsonl").end is None


def test_more_replayers_than_sessions_are_refused(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", trace(2, 1))
    told = ["--share", "2/3", "--gate", str(tmp_path)]
    run = ReplayProcess("http://127.0.0.1:1", path, tmp_path / "o.jsonl", *told)
    code, said = run.finish()
    assert code == 64
    assert "2 sessions cannot be shared by 3 replayers" in said
