# SPDX-License-Identifier: Apache-2.0
"""The parts of the load driver: plan, arrivals, prompts, event stream."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from time import perf_counter_ns

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax.load.alarm import Alarm
from kvtax.load.client import Ledger
from kvtax.load.plan import Plan, PlanError, bodies, read_plan, timetables
from kvtax.load.sse import CompletionStream, StreamError
from kvtax.records.requests import DriverEnd, RequestRecord, RequestsHeader


def make_plan(requests=40, rate_rps=200.0, **changes) -> dict:
    phases = [{"name": "growth", "requests": requests, "rate_rps": rate_rps}]
    return {
        "model": "null",
        "vocab_size": 1000,
        "prompt_tokens": 40,
        "output_tokens": 4,
        "phases": phases,
        **changes,
    }


def plan_of(**changes) -> Plan:
    return msgspec.convert(make_plan(**changes), Plan)


BAD_PLANS = {
    "unknown field": (make_plan(rate=3), "rate"),
    "missing field": ({"model": "null"}, "vocab_size"),
    "wrong type": (make_plan(output_tokens="8"), "$.output_tokens"),
    "no request": (make_plan(requests=0), "$.phases[0].requests"),
    "unknown arrival": (make_plan(arrival="bursty"), "$.arrival"),
    "twin phases": (make_plan(phases=make_plan()["phases"] * 2), "names must differ"),
    "too few prompts": (make_plan(vocab_size=2), "raise vocab_size"),
    "too short a phase": (
        make_plan(
            phases=[
                {"name": "growth", "requests": 9, "rate_rps": 1.0},
                {"name": "hold", "requests": 9, "rate_rps": 1.0, "prompt_tokens": 1},
            ]
        ),
        "distinct prompts of 1 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_bad_plan_is_refused_with_file_and_field(tmp_path, case):
    plan, names = BAD_PLANS[case]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with pytest.raises(PlanError) as error:
        read_plan(path)
    assert str(path) in str(error.value)
    assert names in str(error.value)


def test_poisson_gaps_are_exponential():
    plan = plan_of(arrival="poisson", seed=7, requests=10_000, rate_rps=100.0)
    (table,) = timetables(plan)
    assert table.due_ns[0] == 0
    gaps_s = np.sort(np.diff([*table.due_ns, table.length_ns]) / 1e9)
    n = len(gaps_s)
    exponential = 1 - np.exp(-100.0 * gaps_s)
    empirical = np.arange(1, n + 1) / n
    # Kolmogorov-Smirnov at 1 %; the seed is fixed, so it passes always or never.
    assert np.max(np.abs(exponential - empirical)) < 1.63 / np.sqrt(n)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["constant", "poisson"]))
def test_a_seed_is_a_schedule_and_a_set_of_prompts(seed, arrival):
    plan = plan_of(seed=seed, arrival=arrival, requests=5)
    assert timetables(plan) == timetables(plan)
    assert list(bodies(plan)) == list(bodies(plan))
    other = plan_of(seed=seed + 1, arrival="poisson", requests=5)
    assert timetables(plan) != timetables(other)
    assert list(bodies(plan)) != list(bodies(other))


def test_no_two_prompts_share_a_first_block():
    plan = plan_of(vocab_size=3, prompt_tokens=16, requests=600)
    prompts = [json.loads(body)["prompt"] for body in bodies(plan)]
    assert len({tuple(prompt) for prompt in prompts}) == 600
    assert {token for prompt in prompts for token in prompt} == {1, 2}


def test_a_phase_has_its_own_shape_or_the_one_of_the_plan():
    phases = [
        {"name": "growth", "requests": 2, "rate_rps": 1.0},
        {"name": "fill.0.1.8", "requests": 1, "rate_rps": 1.0, "output_tokens": 1},
        {"name": "hold.0.1.8", "requests": 2, "rate_rps": 1.0, "prompt_tokens": 12},
    ]
    sent = [json.loads(body) for body in bodies(plan_of(phases=phases))]
    shapes = [(len(body["prompt"]), body["max_tokens"]) for body in sent]
    assert shapes == [(40, 4), (40, 4), (40, 1), (12, 4), (12, 4)]
    assert all(body["min_tokens"] == body["max_tokens"] for body in sent)


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode()


TOKEN = event(choices=[{"text": "", "token_ids": [5]}], usage=None)
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
LINES = st.lists(
    st.sampled_from(
        [
            TOKEN,
            USAGE,
            event(choices=[{"text": "é", "token_ids": None}]),
            event(choices=[]),
            event(error={"message": "dead"}),
            b"data: [DONE]",
            b"data: {",
            b": comment",
            b"",
        ]
    )
)


def outcome(pieces: list[bytes]) -> tuple:
    """Usage or error, and the number of bytes fed when the first token was seen."""
    stream, fed = CompletionStream(), 0
    try:
        for piece in pieces:
            fed += len(piece)
            stream.feed(piece, fed)
        return stream.usage(), stream.first_token_ns, stream.last_token_ns
    except StreamError as error:
        return str(error), stream.first_token_ns, None


@settings(deadline=None)
@given(LINES, st.sampled_from([b"\n\n", b"\r\n\r\n"]), st.data())
def test_any_split_of_a_stream_gives_the_same_result(lines, newline, data):
    body = b"".join(line + newline for line in lines)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=20).map(sorted))
    bounds = [0, *cuts, len(body)]
    pieces = [body[a:b] for a, b in pairwise(bounds)]

    def seen_at(whole_ns: int | None) -> int | None:
        """When the split stream must have seen what ends at that byte."""
        return whole_ns and min(bound for bound in bounds if bound >= whole_ns)

    bytewise = outcome([body[i : i + 1] for i in range(len(body))])
    result, first, last = bytewise
    assert outcome(pieces) == (result, seen_at(first), seen_at(last))


def test_a_complete_stream_gives_usage_and_the_times_of_its_tokens():
    stream = CompletionStream()
    for now, line in enumerate([TOKEN, TOKEN, USAGE, b"data: [DONE]"], start=1):
        stream.feed(line + b"\n\n", now)
    assert stream.usage().completion_tokens == 2
    assert (stream.first_token_ns, stream.last_token_ns) == (1, 2)


def test_an_in_band_error_is_not_hidden_by_what_follows():
    dead = event(error={"message": "dead"})
    lines = [TOKEN, dead, TOKEN, USAGE, b"data: [DONE]"]
    result, _, _ = outcome([line + b"\n\n" for line in lines])
    assert result == 'in-band error: {"message":"dead"}'


def test_an_alarm_wakes_every_waiter_in_order_and_never_early():
    async def wait(alarm: Alarm, due_ns: int, woken: list[tuple[int, int]]) -> None:
        await alarm.sleep_until(due_ns)
        woken.append((due_ns, perf_counter_ns()))

    async def wait_for_all() -> list[tuple[int, int]]:
        woken: list[tuple[int, int]] = []
        now_ns = perf_counter_ns()
        with Alarm() as alarm:
            async with asyncio.TaskGroup() as group:
                # None is due before all of them wait.
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("kvtax.load.alarm.perf_counter_ns", lambda: 0)
                    for after_ms in (30, 10, 20, 10, -5, 40):
                        due_ns = now_ns + after_ms * 1_000_000
                        group.create_task(wait(alarm, due_ns, woken))
                    gone = group.create_task(wait(alarm, now_ns + 5_000_000, []))
                    await asyncio.sleep(0)
                gone.cancel()
        return woken

    woken = asyncio.run(wait_for_all())
    assert woken == sorted(woken)
    assert len(woken) == 6
    assert all(now_ns >= due_ns for due_ns, now_ns in woken)


@pytest.mark.parametrize(
    ("rate_rps", "requests", "due_ms", "length_ms"),
    [
        (4.0, 4, [0, 250, 500, 750], 1_000),
        (1_000.0, 2, [0, 1], 2),
        (0.5, 1, [0], 2_000),
    ],
)
def test_a_phase_begins_with_a_request_and_ends_a_gap_after_the_last(
    rate_rps, requests, due_ms, length_ms
):
    (table,) = timetables(plan_of(requests=requests, rate_rps=rate_rps))
    assert table.due_ns == [ms * 1_000_000 for ms in due_ms]
    assert table.length_ns == length_ms * 1_000_000


@pytest.mark.parametrize(
    ("budget_ms", "late_ms", "valid"),
    # 99 requests of 0 to 98 ms, and one of 500: p99 is 98 and a hundredth of the rest.
    [(103.0, 500, True), (102.0, 500, False), (99.0, 99, True), (98.0, 99, False)],
)
def test_a_run_is_valid_if_p99_of_its_lag_is_within_the_budget(
    tmp_path, budget_ms, late_ms, valid
):
    header = RequestsHeader(plan={}, scheduled=100)
    ledger = Ledger(tmp_path / "requests.jsonl", header, budget_ms)
    for number, lag_ms in enumerate([*range(99), late_ms]):
        sent = {"intended_ns": 1_000, "sent_ns": 1_000 + lag_ms * 1_000_000}
        ledger.add(
            RequestRecord(
                id=number, phase="growth", prompt_tokens=1, status="ok", **sent
            )
        )
    # A request whose phase may begin at any time is never late.
    ledger.add(
        RequestRecord(
            id=100,
            phase="hold.0.0.8",
            prompt_tokens=1,
            status="failed",
            intended_ns=0,
            sent_ns=10**12,
        ),
        on_time=False,
    )
    end = ledger.end(DriverEnd)
    assert end.lag_ms["p50"] == 49.5
    assert end.lag_ms["p90"] == pytest.approx(89.1)
    assert end.lag_ms["p99"] == pytest.approx(98 + 0.01 * (late_ms - 98))
    assert end.lag_ms["max"] == late_ms
    assert (end.ok, end.failed, end.valid) == (100, 1, valid)
