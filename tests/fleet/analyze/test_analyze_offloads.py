# SPDX-License-Identifier: Apache-2.0
"""The report counts offloads and moved sessions, and times them, as they were made."""

from __future__ import annotations

from pathlib import Path

import pytest
from analyze_runs import MODEL, Truth, analysed, write_run

from fleet.analyze.analysis import analyse
from fleet.analyze.frames import requests_frame
from fleet.analyze.moves import moves
from fleet.analyze.offloads import offloads
from fleet.analyze.records import ArmRun, read_run
from fleet.analyze.report import write_report
from fleet.analyze.sessions import SessionDraws
from fleet.analyze.workload import workload
from fleet.policies import Candidate, Snapshot
from lab.records.arm import ArmRecord
from lab.records.decisions import DecisionEnd, DecisionRecord, Offload
from lab.records.instances import Instance
from lab.records.replay import ReplayedRequest
from lab.stats.markdown import DASH

MS = 1_000_000


def decision(number: int, reason: str = "pinned", **more: object) -> DecisionRecord:
    candidates = [
        Candidate("i0", "both", 2, 900, 0, 0),
        Candidate("i1", "both", *[0] * 4),
    ]
    told = {
        "id": f"s{number}/0",
        "number": number,
        "attempt": 0,
        "session": f"s{number}",
        "at_ns": 0,
        "policy": "elastic",
        "instance": "i1",
        "prefill_instance": None,
        "read_from": None,
        "kind": "HEAVY",
        "prompt_tokens": 30_000,
        "form": "ids",
        "cache": "mirror",
        "scores": {},
        "snapshot": Snapshot(candidates, "i0", number, 0),
        "decision_us": 1.0,
    }
    return DecisionRecord(reason=reason, **told | more)


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
    requests = [asked(f"s{n}" if n != 3 else "sä") for n in range(16)]
    run = arm(decisions, ends, requests)
    frame = requests_frame([run])
    found = offloads([run], frame, SessionDraws(frame["session"]))
    assert (found["requests"], found["begun"], found["used"]) == (16, 12, 10)
    assert found["failures"] == {"prefill_slow": 1, "resting": 1}
    assert found["kept"] == {
        "an instance is overloaded": 2,
        "2 offloads under way": 1,
    }
    p50 = {
        phase: levels["p50"]["value"] for phase, levels in found["phases_ms"].items()
    }
    assert p50["handover"] == 20
    assert 104 <= p50["prefill"] <= 105
    assert p50["total"] == p50["prefill"] + 20
    low, high = found["phases_ms"]["prefill"]["p50"]["ci95"]
    assert 100 <= low < 104.5 < high <= 109


def test_an_arm_that_prefills_nothing_elsewhere_has_no_offloads() -> None:
    run = arm([decision(0)], [ended(0, None)], [asked("s0")])
    frame = requests_frame([run])
    assert offloads([run], frame, SessionDraws(frame["session"])) is None


def asked(session: str) -> ReplayedRequest:
    return ReplayedRequest(
        id=f"{session}/0",
        session=session,
        turn=0,
        arrival_s=0,
        input_tokens=1,
        output_tokens=1,
    )


def turn(number: int, ttft_ms: int, tpot_ms: int) -> ReplayedRequest:
    at_ns = number * 10_000 * MS
    first_ns = at_ns + ttft_ms * MS
    return ReplayedRequest(
        id=f"s{number}/0",
        session="s",
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


def test_a_move_is_held_against_the_turn_before_it() -> None:
    moving = {"prefill_instance": "i0", "moves_from": "i0"}
    decisions = [decision(0), decision(1, **moving), decision(2), decision(3, **moving)]
    failed = Offload("i0", 0, failure="handover_slow")
    offloaded = [None, used(0, 1, 1), None, failed]
    ends = [ended(n, offload) for n, offload in enumerate(offloaded)]
    turns = [turn(0, 100, 30), turn(1, 170, 22), turn(2, 90, 22), turn(3, 900, 60)]
    found = moves(requests_frame([arm(decisions, ends, turns)]))
    assert found == {
        "decided": 2,
        "arrived": 1,
        "moved_tokens": 30_000,
        "relief_tokens": 900,
        "ttft_added_ms": pytest.approx(70),
        "tpot_saved_ms": pytest.approx(8),
        "pairs": 1,
    }


def test_nothing_is_said_of_moves_where_nothing_moves() -> None:
    run = arm([decision(0)], [ended(0, None)], [turn(0, 1, 1)])
    assert moves(requests_frame([run])) is None


def test_the_workload_is_what_was_asked_for(tmp_path: Path) -> None:
    (run, *_) = read_run(write_run(tmp_path, [Truth("linear")]))
    made = workload(requests_frame([run]))
    inputs = [request.input_tokens for request in run.requests]
    outputs = [request.output_tokens for request in run.requests]
    assert (made["requests"], made["sessions"]) == (240, 40)
    assert made["prefill_share"] == sum(inputs) / (sum(inputs) + sum(outputs))
    spreads = made["spreads"]
    assert spreads["input tokens"]["mean"] == pytest.approx(sum(inputs) / 240, abs=0.1)
    assert spreads["turns per session"] == dict.fromkeys(
        ("mean", "p50", "p90", "max"), 6
    )
    assert spreads["input tokens per session"]["mean"] == pytest.approx(
        sum(inputs) / 40, abs=0.1
    )
    grown = [
        run.requests[n + 5].input_tokens - run.requests[n].input_tokens
        for n in range(0, 240, 6)
    ]
    assert spreads["growth per session, tokens"]["max"] == max(grown)


def test_the_report_has_a_section_for_each_only_where_there_is_something(
    tmp_path: Path,
) -> None:
    _, report = analysed(tmp_path / "a", Truth("linear"))
    assert "## Workload" in report
    assert "| turns per session | 6 |" in report
    for section in ("## Offloads", "## Migrated sessions"):
        assert section not in report
    decisions = [decision(n, prefill_instance="i0", moves_from="i0") for n in range(9)]
    turns = [turn(n, 100, 30) for n in range(9)]
    ends = [ended(n, used(0, 100, 20)) for n in range(9)]
    run = arm(decisions, ends, turns)
    document = analyse([run], MODEL, 100.0).document
    assert document["arms"]["elastic"]["moves"]["arrived"] == 9
    report = write_report(document, [])
    assert f"| `elastic` | 9 | 9 (100.0%) | 9 | {DASH} | {DASH} |" in report
    assert "P's queue and prefill | 100" in report
    assert "| `elastic` | 9 | 9 | 270 | 900 |" in report
