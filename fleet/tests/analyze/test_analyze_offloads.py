# SPDX-License-Identifier: Apache-2.0
"""Offloads and moved sessions are counted and timed as they were made."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet.tests.analyze.analyze_runs import (
    MODEL,
    Truth,
    analysed,
    lines,
    text_of,
    write_run,
)
from kvtax.records import RecordsError
from kvtax.records.requests import ReplayedRequest, ids_of_completion
from kvtax.report.markdown import DASH
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze.analysis import analyse
from kvtax_fleet.analyze.arm_runs import ArmRun, read_run
from kvtax_fleet.analyze.frames import requests_frame
from kvtax_fleet.analyze.offloads import ENGINE_PHASES, engine_phases, offloads
from kvtax_fleet.analyze.request_tables import WorkloadSpread, workload
from kvtax_fleet.records.arm import ArmRecord
from kvtax_fleet.records.decisions import (
    Candidate,
    DecisionEnd,
    DecisionRecord,
    Offload,
    Snapshot,
)
from kvtax_fleet.records.instances import Instance

MS = 1_000_000


def decision(number: int, reason: str = "pinned", **more: object) -> DecisionRecord:
    candidates = [
        Candidate("i0", "both", 2, 900, 0, 0),
        Candidate("i1", "both", *[0] * 4),
    ]
    recorded = {
        "id": f"s{number}/0",
        "number": number,
        "attempt": 0,
        "session": f"s{number}",
        "at_ns": 0,
        "policy": "elastic",
        "instance": "i1",
        "prefill_instance": None,
        "kind": "HEAVY",
        "prompt_tokens": 30_000,
        "form": "ids",
        "cache": "mirror",
        "scores": {},
        "snapshot": Snapshot(candidates, "i0", number, 0),
        "decision_us": 1.0,
    }
    return DecisionRecord(reason=reason, **recorded | more)


def ended(number: int, offload: Offload | None) -> DecisionEnd:
    end = DecisionEnd(f"s{number}/0", number, None, instance="i1", offload=offload)
    if offload is not None and offload.failure is None:
        end.prefill_instance = offload.prefill_instance
    return end


def arm(
    decisions: list[DecisionRecord],
    ends: list[DecisionEnd],
    requests: list[ReplayedRequest] = (),
) -> ArmRun:
    instances = [Instance(name, f"http://{name}") for name in ("i0", "i1")]
    info = ArmRecord(arm="elastic", repeat=0, status="ok", instances=instances)
    return ArmRun(Path(), info, list(requests), None, decisions, ends, {}, 0)


def used(begun_ms: int, prefill_ms: int, handover_ms: int) -> Offload:
    asked = begun_ms * MS
    done = asked + prefill_ms * MS
    return Offload("i0", asked, asked, done, done, done + handover_ms * MS)


def test_offloads_are_counted_by_what_became_of_them() -> None:
    decisions = [decision(n, prefill_instance="i0") for n in range(12)]
    decisions += [
        decision(12, "i0 is overloaded: not offloaded"),
        decision(13, "i1 is overloaded: not offloaded"),
        decision(14, "2 offloads under way: not offloaded"),
        decision(15),
    ]
    ends = [ended(n, used(n, 100 + n, 20)) for n in range(10)]
    ends.append(ended(10, Offload("i0", 0, 0, ended_ns=9, failure="prefill_slow")))
    ends.append(ended(11, Offload("i0", 0, failure="resting")))
    ends += [ended(n, None) for n in range(12, 16)]
    # The replayer quotes what a header may not hold.
    decisions[3].id, ends[3].id = "s%C3%A4/0", "s%C3%A4/0"
    requests = [turn(n, session=f"s{n}") for n in range(16)]
    requests[3].id, requests[3].session = "sä/0", "sä"
    run = arm(decisions, ends, requests)
    frame = requests_frame([run])
    tables = offloads([run], frame, SessionDraws(frame["session"]))
    assert (tables.requests, tables.begun, tables.used) == (16, 12, 10)
    assert tables.failures == {"prefill_slow": 1, "resting": 1}
    assert tables.kept == {
        "an instance is overloaded": 2,
        "2 offloads under way": 1,
    }
    p50 = {phase: levels["p50"].value for phase, levels in tables.phases_ms.items()}
    assert p50["handover"] == 20
    assert 104 <= p50["prefill"] <= 105
    assert p50["total"] == p50["prefill"] + 20
    low, high = tables.phases_ms["prefill"]["p50"].ci95
    assert 100 <= low < 104.5 < high <= 109


def test_an_arm_that_prefills_nothing_elsewhere_has_no_offloads() -> None:
    run = arm([decision(0)], [ended(0, None)], [turn(0)])
    frame = requests_frame([run])
    assert offloads([run], frame, SessionDraws(frame["session"])) is None


def turn(
    number: int, ttft_ms: int = 100, tpot_ms: int = 30, session: str = "s"
) -> ReplayedRequest:
    at_ns = number * 10_000 * MS
    first_ns = at_ns + ttft_ms * MS
    return ReplayedRequest(
        id=f"s{number}/0",
        session=session,
        turn=number,
        arrival_s=0,
        input_tokens=30_000,
        output_tokens=11,
        status="ok",
        intended_ns=at_ns,
        sent_ns=at_ns,
        first_token_ns=first_ns,
        end_ns=first_ns + 10 * tpot_ms * MS,
        usage_prompt_tokens=30_000,
        usage_completion_tokens=11,
        instance="i1",
    )


def test_the_workload_is_what_was_asked_for(tmp_path: Path) -> None:
    (run, *_) = read_run(write_run(tmp_path, [Truth("linear")]))
    made = workload(requests_frame([run]))
    inputs = [request.input_tokens for request in run.requests]
    outputs = [request.output_tokens for request in run.requests]
    assert (made.requests, made.sessions) == (240, 40)
    assert made.prefill_share == sum(inputs) / (sum(inputs) + sum(outputs))
    spreads = made.spreads
    assert spreads["input tokens"].mean == pytest.approx(sum(inputs) / 240, abs=0.1)
    assert spreads["turns per session"] == WorkloadSpread(6, 6, 6, 6)
    assert spreads["input tokens per session"].mean == pytest.approx(
        sum(inputs) / 40, abs=0.1
    )
    grown = [
        run.requests[n + 5].input_tokens - run.requests[n].input_tokens
        for n in range(0, 240, 6)
    ]
    assert spreads["growth per session, tokens"].max == max(grown)


@pytest.mark.slow
def test_the_report_has_a_section_for_each_only_where_there_is_something(
    tmp_path: Path,
) -> None:
    _, report = analysed(tmp_path / "a", Truth("linear"))
    assert "## Workload" in report
    assert "| turns per session | 6 |" in report
    assert "## Offloads" not in report
    decisions = [decision(n, prefill_instance="i0") for n in range(9)]
    turns = [turn(n) for n in range(9)]
    ends = [ended(n, used(0, 100, 20)) for n in range(9)]
    run = arm(decisions, ends, turns)
    analysis = analyse([run], MODEL, 100.0)
    report = text_of(analysis)
    assert f"| `elastic` | 9 | 9 (100.0%) | 9 | {DASH} | {DASH} |" in report
    assert "P's queue and prefill | 100" in report


ID = "s%C3%A4/3"  # as the header had it


def engine(
    folder: Path, steps: dict[int, tuple[int, int]], *requests: dict, **header: object
) -> None:
    """`steps`: their first and last moment, in ms."""
    folder.mkdir(parents=True)
    head = {"schema": "kvtax.engine_step/1"} | header
    records = [
        {"step_id": step, "t_ns": begin * MS, "step_us": 1e3 * (end - begin)}
        for step, (begin, end) in steps.items()
    ]
    lines(folder / "engine_step.jsonl", [head, *records])
    head = {"schema": "kvtax.engine_request/1", "ids": "hashed"} | header
    lines(folder / "engine_request.jsonl", [head, *requests])


def request(arrival_ms: int, first: int, token: int, *waits_ms: int, **more) -> dict:
    return {
        "id": ids_of_completion(ID)[1],
        "arrival_ns": arrival_ms * MS,
        "prompt_tokens": 9,
        "first_step": first,
        "first_token_step": token,
        "kv_wait_ns": [ms * MS for ms in waits_ms],
    } | more


def run(folder: Path, **offload: object) -> ArmRun:
    chosen = Offload("p", 0, **offload)
    end = DecisionEnd(ID, 0, "sä", instance="d", prefill_instance="p", offload=chosen)
    info = ArmRecord(arm="a", repeat=2, status="ok")
    return ArmRun(folder, info, [], None, [], [end], {}, 0)


def put_p(folder: Path, **header: object) -> None:
    engine(
        folder / "instances" / "p",
        {7: (110, 150), 8: (150, 200)},
        request(100, 7, 8),
        **header,
    )


@pytest.mark.parametrize(
    ("waits", "transfer_ms"),
    [
        pytest.param((102, 230), 30, id="mooncake: D waits from the beginning"),
        pytest.param((205, 230), 25, id="nixl: D is asked after P"),
    ],
)
def test_phases_follow_each_other_from_ps_queue_to_ds_first_token(
    tmp_path: Path, waits: tuple[int, int], transfer_ms: int
) -> None:
    put_p(tmp_path)
    engine(
        tmp_path / "instances" / "d",
        {4: (90, 234), 5: (234, 241)},
        # A pull that was given up before, by the same name.
        request(50, 4, 4),
        request(101, 5, 5, *waits),
    )
    (row,) = engine_phases(run(tmp_path))
    assert row == {
        "repeat": 2,
        "id": "sä/3",
        "p_queue": 10,
        "p_prefill": 90,
        "transfer": transfer_ms,
        "d_start": 4,
        "first_token": 7,
    }
    assert [*row][2:] == list(ENGINE_PHASES)


def test_without_records_of_both_by_one_clock_nothing_is_said(tmp_path: Path) -> None:
    assert engine_phases(run(tmp_path)) == []
    put_p(tmp_path / "alone")
    assert engine_phases(run(tmp_path / "alone")) == []
    apart = tmp_path / "apart"
    put_p(apart, boot_id="one")
    steps = {5: (234, 241)}
    engine(apart / "instances" / "d", steps, request(1, 5, 5, 2, 230), boot_id="two")
    assert engine_phases(run(apart)) == []
    # An engine that ended before it, or whose file lacks the step.
    torn = tmp_path / "torn"
    put_p(torn)
    engine(torn / "instances" / "d", steps, request(1, 6, 6, 2, 230))
    assert engine_phases(run(torn)) == []


def test_an_offload_that_failed_has_no_phases(tmp_path: Path) -> None:
    put_p(tmp_path)
    engine(tmp_path / "instances" / "d", {5: (1, 2)}, request(1, 5, 5, 2, 3))
    assert engine_phases(run(tmp_path, failure="handover_slow")) == []


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    put_p(tmp_path)
    engine(tmp_path / "instances" / "d", {5: (1, 2)}, {"id": 7})
    with pytest.raises(RecordsError, match=r"d/engine_request.jsonl:2"):
        engine_phases(run(tmp_path))
