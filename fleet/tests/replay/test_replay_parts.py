# SPDX-License-Identifier: Apache-2.0
"""The parts of the replayer: sessions of a trace, the steady window, checks."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from unittest.mock import patch

import msgspec
import pytest
from fleet.tests.replay.replay_lab import trace
from hypothesis import given
from hypothesis import strategies as st
from kvtax.cli import Exit, main
from kvtax.load.sse import StreamError, Usage

from kvtax_fleet.replay import play
from kvtax_fleet.replay.http_link import Model, authorization, check_lengths
from kvtax_fleet.replay.options import Options, ReplayError
from kvtax_fleet.replay.play import Player
from kvtax_fleet.replay.sessions import (
    asked_output_tokens,
    group,
    new_ledger,
    record_of,
    steady_window,
)
from kvtax_fleet.simulate.virtual_loop import VirtualLoop


def changed(request, **fields):
    return msgspec.structs.replace(request, **fields)


@given(st.integers(1, 8), st.integers(1, 4))
def test_grouping_keeps_every_request_and_the_order_of_first_arrivals(sessions, turns):
    requests = trace(sessions, turns, gap_s=0.01, think_s=0.015)
    grouped = group(requests)
    kept = [request for session in grouped for request in session.turns]
    assert sorted(kept, key=requests.index) == requests
    firsts = [session.turns[0].arrival_s for session in grouped]
    assert firsts == sorted(firsts)
    for session in grouped:
        numbers = [request.turn for request in session.turns]
        assert numbers == list(range(len(numbers)))


def test_a_trace_that_cannot_be_followed_is_refused():
    first, second = trace(1, 2)
    with pytest.raises(ReplayError, match="no request"):
        group([])
    with pytest.raises(ReplayError, match=r"session 's0', turn 0: comes after turn 1"):
        group([second, first])
    with pytest.raises(ReplayError, match="comes after turn 0"):
        group([first, first])
    with pytest.raises(ReplayError, match="turn 1: has no think_s"):
        group([first, changed(second, think_s=None)])


spans = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(1, 500)).map(lambda x: (x[0], sum(x))),
    min_size=1,
    max_size=30,
)


def in_flight(spans: list[tuple[int, int]], now: float) -> int:
    return sum(begin <= now < end for begin, end in spans)


@given(spans)
def test_the_window_opens_at_the_mean_load_and_closes_when_no_session_can_begin(spans):
    window = steady_window(spans)
    last_begin = max(begin for begin, _ in spans)
    end = min(end for _, end in spans if end > last_begin)
    first = min(begin for begin, _ in spans)
    assert window.end_ns == end
    mean = sum(in_flight(spans, now) for now in range(first, end)) / (end - first)
    loads = [(now, in_flight(spans, now)) for now in range(first, end)]
    reached = next(now for now, load in loads if load >= mean)
    assert window.start_ns == reached


class NotedLink:
    """Answers at once, and notes what is made and sent, in order."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def now_ns(self) -> int:
        return 0

    async def sleep_until(self, due_ns: int) -> None:
        await asyncio.sleep(0)

    def prepare(self, requests):
        self.noted += [f"make turn {request.turn}" for request in requests]
        made = [Future() for _ in requests]
        for body in made:
            body.set_result(b"")
        return made

    async def send(self, record, body) -> None:
        self.noted.append(f"send turn {record.turn}")
        await asyncio.sleep(0)
        record.status, record.end_ns = "ok", 0


class VirtualLink(NotedLink):
    """Sends `late_s` late, and answers `answer_s` after the send, in virtual time."""

    def __init__(self, answer_s: float, late_s: float = 0.0) -> None:
        super().__init__()
        self.answer_s, self.late_s = answer_s, late_s
        self.loop = VirtualLoop()
        self.now_ns, self.sleep_until = self.loop.now_ns, self.loop.sleep_until
        self.times_s: dict[str, tuple[float, float]] = {}

    async def send(self, record, body) -> None:
        await asyncio.sleep(self.late_s)
        record.sent_ns = self.now_ns()
        self.times_s[record.id] = record.intended_ns / 1e9, record.sent_ns / 1e9
        await asyncio.sleep(self.answer_s)
        record.status, record.end_ns = "ok", self.now_ns()


def played(requests, tmp_path, link: VirtualLink, **options) -> Player:
    """Play a trace from 0 s of virtual time on."""
    settings = Options("", "", **options)
    sessions = group(requests)
    header = {"model": "m", "scheduled": len(requests), "sessions": len(sessions)}
    records = new_ledger(tmp_path / "replay.jsonl", settings, **header, trace_sha256="")

    player = Player(settings, sessions, link, records)
    with (
        patch.object(play, "LEAD_NS", 0),
        asyncio.Runner(loop_factory=lambda: link.loop) as runner,
    ):
        runner.run(player.play())
    return player


@pytest.mark.parametrize(
    ("options", "due_s"),
    [
        # Answers take 2 s, and the user thinks for 5: sessions arrive 1 s apart.
        ({}, {"s0": [0, 7, 14], "s1": [1, 8, 15], "s2": [2, 9, 16]}),
        # Ten times as fast: 0.5 s to think, while answers take as long as before.
        (
            {"time_scale": 10.0},
            {"s0": [0, 2.5, 5], "s1": [0.1, 2.6, 5.1], "s2": [0.2, 2.7, 5.2]},
        ),
        # A session that finds no slot is due when one is free: at 16 s.
        (
            {"max_inflight_sessions": 2},
            {"s0": [0, 7, 14], "s1": [1, 8, 15], "s2": [16, 23, 30]},
        ),
        # Two at a time, whenever they arrive.
        (
            {"max_inflight_sessions": 2, "closed_loop": True},
            {"s0": [0, 7, 14], "s1": [0, 7, 14], "s2": [16, 23, 30]},
        ),
        # As the trace says: turns 5 s apart, or when the answer is there.
        (
            {"trace_times": True},
            {"s0": [0, 5, 10], "s1": [1, 6, 11], "s2": [2, 7, 12]},
        ),
        (
            {"trace_times": True, "time_scale": 10.0},
            {"s0": [0, 2, 4], "s1": [0.1, 2.1, 4.1], "s2": [0.2, 2.2, 4.2]},
        ),
    ],
)
def test_a_turn_is_due_its_think_time_after_the_answer_before(tmp_path, options, due_s):
    requests = trace(3, 3, gap_s=1.0, think_s=5.0)
    link = VirtualLink(answer_s=2.0)
    played(requests, tmp_path, link, **options)
    for session, times in due_s.items():
        for turn, due in enumerate(times):
            seen = link.times_s[f"{session}/{turn}"]
            assert seen == pytest.approx((due, due), abs=1e-6)


def test_a_late_send_is_recorded_beside_the_time_when_it_was_due(tmp_path):
    requests = trace(1, 2, think_s=5.0)
    link = VirtualLink(answer_s=2.0, late_s=0.25)
    end = played(requests, tmp_path, link).end()
    # The second is due 5 s after the answer to the first, which began late.
    assert link.times_s == {"s0/0": (0, 0.25), "s0/1": (7.25, 7.5)}
    assert end.lag_ms == {"p50": 250.0, "p90": 250.0, "p99": 250.0, "max": 250.0}
    assert end.valid is False


def test_while_all_slots_begin_no_further_turn_of_theirs_is_made(tmp_path):
    options = Options("", "", max_inflight_sessions=9, closed_loop=True)
    link = NotedLink()
    header = {"model": "m", "scheduled": 27, "sessions": 9, "trace_sha256": ""}
    records = new_ledger(tmp_path / "replay.jsonl", options, **header)
    player = Player(options, group(trace(9, 3, think_s=0)), link, records)
    asyncio.run(player.play())
    begin = link.noted.index("send turn 0")
    assert Counter(link.noted[:begin]) == {"make turn 0": 9, "make turn 1": 9}
    assert link.noted[begin : begin + 9] == ["send turn 0"] * 9
    assert Counter(link.noted) == {
        f"{verb} turn {turn}": 9 for verb in ("make", "send") for turn in range(3)
    }


def test_slots_that_are_always_taken_are_steady_from_the_start():
    spans = [(0, 10), (0, 30), (10, 25), (25, 60), (30, 50)]
    assert steady_window(spans) == (0, 50)
    assert steady_window([]) is None


def test_arrivals_that_pile_up_are_steady_once_they_have():
    spans = [(10 * n, 10 * n + 35) for n in range(20)]
    assert steady_window(spans) == (30, 195)


def test_a_request_longer_than_the_context_is_named():
    sessions = group(trace(2, 3, input_tokens=40, output_tokens=10))
    check_lengths(sessions, Model("m", 130))
    check_lengths(sessions, Model("m", None))
    with pytest.raises(ReplayError, match=r"2 requests .* the first is s0/2 with 120"):
        check_lengths(sessions, Model("m", 129))


def test_no_output_is_one_token_asked_for():
    (request,) = trace(1, 1, output_tokens=0)
    assert asked_output_tokens(request) == 1
    assert record_of(request).output_tokens == 1


def test_a_key_is_sent_only_if_there_is_one(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert authorization() == {}
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert authorization() == {"Authorization": "Bearer k"}


def test_usage_is_checked_and_cached_tokens_may_be_missing():
    usage = msgspec.json.decode(
        b'{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}',
        type=Usage,
    )
    assert usage.cached_tokens is None
    usage.check(5, 2)
    with pytest.raises(StreamError, match="asked for 5 prompt and 3 output tokens"):
        usage.check(5, 3)
    body = b'{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":%s}'
    for details, cached in ((b'{"cached_tokens":4}', 4), (b"{}", None)):
        assert msgspec.json.decode(body % details, type=Usage).cached_tokens == cached


BAD_LINES = {
    "time scale 0": (["--time-scale", "0"], "--time-scale"),
    "closed loop": (["--closed-loop"], "--max-inflight-sessions"),
    "no number": (["--timeout", "soon"], "--timeout"),
    "not finite": (["--time-scale", "inf"], "--time-scale"),
    "below": (["--max-inflight-sessions", "0"], "0: Expected `int` >= 1"),
    "no url": (["--url", "localhost:8000"], "must begin with http"),
    "no trace": (["--trace", "/nowhere"], "/nowhere"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_command_line_is_bad_input_and_the_option_is_named(
    case, capsys, tmp_path
):
    options, reason = BAD_LINES[case]
    command = ["--url", "http://x", "--trace", "t", "--out", str(tmp_path), *options]
    try:
        status = main(["fleet", "replay", *command])
    except SystemExit as exit:
        status = exit.code
    assert status == Exit.BAD_INPUT
    assert reason in capsys.readouterr().err
