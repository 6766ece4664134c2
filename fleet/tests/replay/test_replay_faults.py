# SPDX-License-Identifier: Apache-2.0
"""Whatever the server does, every request of a trace ends in exactly one record, and
no session goes on after a turn that failed."""

from __future__ import annotations

import signal

import pytest
from fleet.tests.replay.replay_lab import (
    Lines,
    ReplayProcess,
    assert_accounted_for,
    assert_closed_loop_inside,
    replay_here,
    trace,
    write_trace,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtax.cli import Exit
from tests.harness.standin.process import standin
from tests.harness.standin.server import FAULTS

pytestmark = pytest.mark.slow

SURVIVABLE = sorted(set(FAULTS) - {"exit", "withhold_kv"})


@pytest.fixture(scope="module")
def server():
    with standin("--step-us", "200") as running:
        yield running


@pytest.fixture(autouse=True)
def no_faults_left(server):
    yield
    server.set_faults()


@settings(deadline=None, max_examples=25)
@given(
    cycle=st.lists(st.sampled_from(["none", "none", *SURVIVABLE]), min_size=1),
    after=st.integers(0, 3),
    sessions=st.integers(1, 6),
    turns=st.integers(1, 4),
    think_s=st.sampled_from([0.0, 0.02]),
    slots=st.sampled_from([None, 1, 3]),
    closed=st.booleans(),
)
def test_under_any_faults_every_request_has_one_record_and_sessions_stop_at_a_bad_turn(
    server, tmp_path_factory, cycle, after, sessions, turns, think_s, slots, closed
):
    requests = trace(sessions, turns, think_s=think_s)
    server.set_faults(*cycle, after=after)
    lines = replay_here(
        server.url,
        requests,
        tmp_path_factory.mktemp("faults") / "replay.jsonl",
        timeout_s=0.15,
        max_inflight_sessions=slots,
        closed_loop=slots is not None and closed,
        time_scale=2,
    )
    assert_accounted_for(lines, requests)
    assert_closed_loop_inside(lines, requests, 2)


REASONS = {
    "hang": "no complete answer within 2 s",
    "hang_first": "no complete answer within 2 s",
    "stall": "no complete answer within 2 s",
    "http500": "HTTP 500",
    "inband": "in-band error",
    "truncated": "stream ended without [DONE]",
    "cut": "ClientPayloadError",
    "short": "asked for 40 prompt and 3 output tokens, usage says 40 and 2",
    "no_token": "stream ended without a token",
    "no_usage": "stream ended without usage",
}


@pytest.mark.parametrize("fault", REASONS)
def test_a_failed_turn_says_why_and_takes_the_rest_of_its_session_along(
    server, tmp_path, fault
):
    server.set_faults("none", fault)
    path = write_trace(tmp_path / "t.jsonl", trace(1, 4))
    run = ReplayProcess(server.url, path, tmp_path / "o.jsonl", "--timeout", "2")
    code, stderr = run.finish()
    assert code == Exit.NOT_MEASURED
    assert "1 ok, 1 failed, 2 cancelled of 4" in stderr
    ok, failed, *cancelled = Lines(run.out).records
    assert ok["status"] == "ok"
    expected = REASONS[fault].replace("40", "80")
    assert expected in failed["error"]
    assert {record["error"] for record in cancelled} == {"turn 1 failed"}


def test_a_server_that_dies_fails_what_it_served_and_loses_no_record(tmp_path):
    # It dies long before the last session begins.
    requests = trace(60, 2, gap_s=0.05)
    path = write_trace(tmp_path / "t.jsonl", requests)
    with standin("--faults", "none," * 10 + "exit") as dying:
        run = ReplayProcess(dying.url, path, tmp_path / "o.jsonl")
        code, _ = run.finish()
    lines = Lines(run.out)
    assert code == Exit.NOT_MEASURED
    assert_accounted_for(lines, requests)
    errors = " ".join(record["error"] for record in lines.having("failed"))
    assert "ClientConnectorError" in errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "slots",
    [
        [],
        ["--max-inflight-sessions", "4"],
        ["--max-inflight-sessions", "4", "--closed-loop"],
    ],
)
def test_a_signal_records_the_rest_as_cancelled(server, tmp_path, signum, slots):
    server.set_faults("none", "none", "none", "hang")
    requests = trace(300, 2, gap_s=0.02)
    path = write_trace(tmp_path / "t.jsonl", requests)
    run = ReplayProcess(server.url, path, tmp_path / "o.jsonl", *slots)
    run.wait_for_records(4)
    run.process.send_signal(signum)
    code, stderr = run.finish()
    assert code == 128 + signum
    assert f"stopped by {signum.name}" in stderr
    lines = Lines(run.out)
    assert_accounted_for(lines, requests)
    cancelled = lines.having("cancelled")
    assert {record["error"] for record in cancelled} == {"replay stopped"}
    assert any(record["sent_ns"] for record in cancelled), "in flight"
    assert any(not record["sent_ns"] for record in cancelled), "not sent yet"
    assert lines.end["steady"] is None


def test_a_killed_replayer_leaves_whole_lines_but_for_the_last(server, tmp_path):
    path = write_trace(tmp_path / "t.jsonl", trace(2000, 1, gap_s=0.005))
    run = ReplayProcess(server.url, path, tmp_path / "o.jsonl")
    run.wait_for_records(22)
    run.process.kill()
    run.process.communicate()
    lines = Lines(run.out)
    assert lines.end is None
    ids = [record["id"] for record in lines.records]
    assert len(ids) == len(set(ids)) > 20
    assert len(lines.torn) < 1000
