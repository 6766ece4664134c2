# SPDX-License-Identifier: Apache-2.0
"""The replayer against a server that answers: when it sends, what it records, what it
refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from fleet.tests.replay.replay_lab import (
    Lines,
    ReplayProcess,
    assert_accounted_for,
    assert_closed_loop_inside,
    trace,
    write_trace,
)
from kvtax.cli import Exit
from kvtax.paths import REPOSITORY
from tests.harness.standin.process import standin
from tests.proc.living import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with standin("--max-model-len", "1000") as running:
        yield running


# How late is late is not the question where this is given: tests share machines.
ANY_LAG = ["--lag-budget-ms", "60000"]


def replay(url, requests, tmp_path, *options):
    path = write_trace(tmp_path / "t.jsonl", requests)
    run = ReplayProcess(url, path, tmp_path / "o.jsonl", *ANY_LAG, *options)
    code, stderr = run.finish()
    return code, stderr, run.out


def test_sessions_arrive_as_the_trace_says_and_turns_wait_for_answers(server, tmp_path):
    requests = trace(20, 3, gap_s=0.05, think_s=0.02)
    code, stderr, out = replay(server.url, requests, tmp_path, "--time-scale", "2")
    assert code == 0, stderr
    lines = Lines(out)
    assert_accounted_for(lines, requests)
    assert_closed_loop_inside(lines, requests, 2)
    firsts = [r for r in lines.records if r["turn"] == 0]
    firsts.sort(key=lambda record: record["arrival_s"])
    for before, after in pairwise(firsts):
        gap_ns = after["intended_ns"] - before["intended_ns"]
        assert abs(gap_ns - 25_000_000) <= 1, "whatever the server does"
    assert "lag p50" in stderr


def test_a_server_that_stands_still_delays_no_other_session(tmp_path):
    requests = trace(40, 1, gap_s=0.02, output_tokens=1)
    path = write_trace(tmp_path / "t.jsonl", requests)
    queried = "vllm:prefix_cache_queries_total"
    with standin("--faults", "stall") as stuck:
        run = ReplayProcess(stuck.url, path, tmp_path / "o.jsonl")
        tokens = sum(each.input_tokens for each in requests)
        eventually(lambda: stuck.metrics()[queried] >= tokens)
        run.process.send_signal(signal.SIGTERM)
        run.finish()
    assert all(record["sent_ns"] for record in Lines(run.out).having("cancelled"))


def test_slots_are_never_more_than_asked_and_sessions_begin_in_trace_order(
    server, tmp_path
):
    requests = trace(12, 3, gap_s=5.0, think_s=0.01)
    options = ["--max-inflight-sessions", "3", "--closed-loop"]
    code, stderr, out = replay(server.url, requests, tmp_path, *options)
    assert code == 0, stderr
    lines = Lines(out)
    assert_accounted_for(lines, requests)
    assert_closed_loop_inside(lines, requests, 1.0)
    assert lines.header["load"].startswith("closed loop: 3 sessions")
    by_number = sorted((int(name[1:]), r) for name, r in lines.sessions().items())
    assert [number for number, _ in by_number] == list(range(12))
    free_ns = 0
    for _, records in by_number:
        # Two slots can become free in one moment. Whichever is the first to be taken,
        # nobody is sent before a slot was free for all who come earlier in the trace.
        free_ns = max(free_ns, records[0]["intended_ns"])
        assert records[0]["sent_ns"] >= free_ns
    spans = sorted((r[0]["intended_ns"], r[-1]["end_ns"]) for _, r in by_number)
    for now_ns, _ in spans:
        assert sum(begin <= now_ns < end for begin, end in spans) <= 3
    ends = {end for _, end in spans}
    assert {begin for begin, _ in spans[3:]} < ends, "due when a slot is free"


def test_twenty_is_twenty_times_faster(server, tmp_path):
    requests = trace(6, 2, gap_s=1.0, think_s=1.0)
    code, stderr, out = replay(server.url, requests, tmp_path, "--time-scale", "20")
    assert code == 0, stderr
    due_ns = [record["intended_ns"] for record in Lines(out).records]
    assert 5 / 20 <= (max(due_ns) - min(due_ns)) / 1e9 < 5
    assert_closed_loop_inside(Lines(out), requests, 20)


def test_who_arrives_while_all_slots_are_taken_waits_for_one(tmp_path):
    """Eight arrive one after the other, two more after a pause; there are two slots."""
    crowd = trace(10, 2, gap_s=0.005, think_s=0.03)
    requests = [
        msgspec.structs.replace(r, arrival_s=2.0) if r.session in ("s8", "s9") else r
        for r in crowd
    ]
    requests.sort(key=lambda request: request.arrival_s)
    with standin() as quick:
        options = ["--max-inflight-sessions", "2"]
        code, stderr, out = replay(quick.url, requests, tmp_path, *options)
    assert code == 0, stderr
    lines = Lines(out)
    assert_accounted_for(lines, requests)
    assert_closed_loop_inside(lines, requests, 1)
    firsts = sorted(
        (r[0]["arrival_s"], r[0]["intended_ns"], r[-1]["end_ns"])
        for r in lines.sessions().values()
    )
    start_ns = firsts[0][1]
    ends, held = set(), 0
    for arrival_s, due_ns, end_ns in firsts:
        arrived_ns = start_ns + round((arrival_s - firsts[0][0]) * 1e9)
        on_time = abs(due_ns - arrived_ns) <= 1
        assert on_time or (due_ns > arrived_ns and due_ns in ends)
        held += not on_time
        ends.add(end_ns)
    for _, now_ns, _ in firsts:
        assert sum(begin <= now_ns < end for _, begin, end in firsts) <= 2
        assert on_time or arrival_s < 2
    assert lines.end["held_sessions"] == held > 0
    assert f"{held} sessions waited for a slot" in stderr


def test_tokens_are_the_servers_and_equal_blocks_are_hits(tmp_path):
    requests = trace(5, 4)
    with standin() as fresh:
        code, stderr, out = replay(fresh.url, requests, tmp_path)
        hits = fresh.metrics()["vllm:prefix_cache_hits_total"]
    assert code == 0, stderr
    records = Lines(out).records
    for record in records:
        assert record["usage_prompt_tokens"] == record["input_tokens"]
        assert record["usage_completion_tokens"] == record["output_tokens"]
        # The turn before shares all its whole blocks with this one.
        assert record["cached_tokens"] == record["turn"] * 40 // 16 * 16
    assert hits == sum(record["cached_tokens"] for record in records)


def test_the_header_says_what_was_replayed_and_how(server, tmp_path):
    requests = trace(3, 3)
    code, stderr, out = replay(server.url, requests, tmp_path, "--time-scale", "2")
    assert code == 0, stderr
    lines = Lines(out)
    assert_accounted_for(lines, requests)
    header = lines.header
    assert header["schema"] == "kvtax.replay/1"
    assert header["clock"] == "CLOCK_MONOTONIC"
    assert header["load"].startswith("open loop")
    assert header["options"]["time_scale"] == 2
    assert (header["model"], header["max_model_len"]) == ("null", 1000)
    assert header["sessions"] == len({r.session for r in requests})
    assert len(header["trace_sha256"]) == 64


REFUSED = {
    "prompts too long": (
        trace(3, 30),
        [],
        "18 requests are longer than the 1000 tokens that null takes",
    ),
    "unknown model": (trace(1), ["--model", "gpt-x"], "no model 'gpt-x'"),
    "vocabulary": (trace(1), ["--vocab-size", "3"], "--vocab-size 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_before_anything_is_sent(server, tmp_path, case):
    requests, options, reason = REFUSED[case]
    before = server.metrics()["vllm:prefix_cache_queries_total"]
    code, stderr, out = replay(server.url, requests, tmp_path, *options)
    assert code == Exit.BAD_INPUT
    assert reason in stderr
    assert not out.exists()
    assert server.metrics()["vllm:prefix_cache_queries_total"] == before


def test_a_server_that_is_not_there_is_refused(tmp_path):
    code, stderr, out = replay("http://127.0.0.1:9", trace(1), tmp_path)
    assert code == Exit.BAD_INPUT
    assert "is the server running?" in stderr
    assert not out.exists()


def test_records_are_never_overwritten(server, tmp_path):
    (tmp_path / "o.jsonl").write_text("mine")
    code, stderr, out = replay(server.url, trace(1), tmp_path)
    assert code == Exit.BAD_INPUT
    assert "never overwritten" in stderr
    assert out.read_text() == "mine"


def test_a_torn_trace_is_refused(server, tmp_path):
    path = write_trace(tmp_path / "t.jsonl", trace(5))
    path.write_bytes(path.read_bytes()[:-20])
    run = ReplayProcess(server.url, path, tmp_path / "o.jsonl")
    code, stderr = run.finish()
    assert code == Exit.BAD_INPUT
    assert "torn" in stderr
    assert not run.out.exists()


def patched(server, tmp_path, before: str, requests) -> tuple[int, str, Path]:
    """Replay with some of the replayer's code changed."""
    path = write_trace(tmp_path / "t.jsonl", requests)
    program = f"import sys\n{before}\nfrom kvtax.cli import main\n"
    out = tmp_path / "o.jsonl"
    command = [sys.executable, "-c", program + "sys.exit(main())", "fleet", "replay"]
    command += ["--url", server.url, "--trace", str(path), "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode, done.stderr, out


def test_a_replay_past_its_lag_budget_is_marked_invalid(server, tmp_path):
    slow = """
import time
from kvtax_fleet.replay.http_link import ReplayClient
send = ReplayClient.send
async def slow(self, *args):
    time.sleep(0.03)
    await send(self, *args)
ReplayClient.send = slow
"""
    code, stderr, out = patched(server, tmp_path, slow, trace(30, 1, gap_s=0.005))
    end = Lines(out).end
    assert code == Exit.NOT_MEASURED
    assert end["ok"] == 30
    assert end["valid"] is False
    assert end["lag_ms"]["p99"] > end["lag_budget_ms"]
    assert "RUN NOT VALID" in stderr


def test_a_full_disk_stops_the_replay(server, tmp_path):
    full = """
from kvtax.load.client import Ledger
write = Ledger._write
def full(self, lines):
    if b'"request"' in lines:
        raise OSError(28, "No space left on device")
    write(self, lines)
Ledger._write = full
"""
    code, stderr, _ = patched(server, tmp_path, full, trace(1000, 1, gap_s=0.05))
    assert code == Exit.BAD_INPUT
    assert "No space left on device" in stderr


def test_a_plain_openai_server_without_cached_tokens_is_replayed(tmp_path):
    """No /v1/models, no cached tokens."""
    requests = trace(5, 3)
    path = write_trace(tmp_path / "t.jsonl", requests)
    with standin("--plain", "--model", "m") as server:
        out = tmp_path / "o.jsonl"
        run = ReplayProcess(server.url, path, out, "--model", "m", *ANY_LAG)
        code, stderr = run.finish()
    assert code == 0, stderr
    lines = Lines(out)
    assert_accounted_for(lines, requests)
    for record in lines.records:
        assert record["cached_tokens"] is None
        assert record["instance"] is None
