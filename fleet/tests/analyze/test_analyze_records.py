# SPDX-License-Identifier: Apache-2.0
"""The files of a run are read as they were written, and bad files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from fleet.tests.analyze.analyze_runs import (
    SESSIONS,
    TURNS,
    Truth,
    lines,
    write_run,
)
from kvtax.records.requests import (
    ReplayedRequest,
    ReplayEnd,
    Steady,
    in_header,
)

from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.frames import LATENCIES, NOTHING, requests_frame, size_class
from kvtax_fleet.records.decisions import DecisionEnd


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    write_run(tmp_path, [Truth("linear", repeats=1)])
    return tmp_path / "linear" / "r0"


def test_a_torn_last_line_is_dropped_and_counted(arm: Path) -> None:
    replay = arm / "replay.jsonl"
    text = replay.read_bytes()
    replay.write_bytes(text[: text.rindex(b'"lag_ms"')])
    (run,) = read_run(arm)
    assert run.torn_lines == 1
    assert run.end is None
    assert len(run.requests) == SESSIONS * TURNS


def test_latencies_are_what_they_are_defined_as(arm: Path) -> None:
    """Due at 0, sent at 1 ms, first token at 11, the end at 61 with 26 tokens."""
    rows = [json.loads(line) for line in (arm / "replay.jsonl").open()]
    first = rows[1]
    times = {"intended_ns": 0, "sent_ns": 1, "first_token_ns": 11, "end_ns": 61}
    first |= {name: ms * 1_000_000 for name, ms in times.items()}
    first |= {"usage_completion_tokens": 26}
    second = first | {"id": "failed", "status": "failed"}
    lines(arm / "replay.jsonl", [rows[0], first, second])
    (run,) = read_run(arm)
    ok, failed = requests_frame([run]).select(*LATENCIES).to_dicts()
    assert ok == {
        "ttft_ms": 11,
        "ttft_sent_ms": 10,
        "tpot_ms": 2,
        "e2e_ms": 61,
        "e2e_sent_ms": 60,
    }
    assert set(failed.values()) == {None}


def test_an_arm_without_files_has_no_requests(tmp_path: Path) -> None:
    facts = {"schema": "kvtax.arm/1", "arm": "a", "repeat": 0, "status": "failed"}
    (tmp_path / "arm.json").write_text(json.dumps(facts))
    (run,) = read_run(tmp_path)
    assert requests_frame([run]).height == 0


def test_ids_that_the_replayer_must_quote_find_their_decisions(arm: Path) -> None:
    """Headers hold printable ASCII, and so do the decisions' ids."""
    for file in ("replay.jsonl", "decisions.jsonl"):
        rows = [json.loads(line) for line in (arm / file).open()]
        for row in rows:
            if "id" in row:
                name = f"Büro 7 % {row['id']}"
                quoted = file == "decisions.jsonl"
                row["id"] = in_header(name) if quoted else name
        lines(arm / file, rows)
    (run,) = read_run(arm)
    assert "%" in run.decisions[0].id
    assert requests_frame([run])["decided_instance"].null_count() == 0


def test_windows_follow_the_intended_send(arm: Path) -> None:
    (run,) = read_run(arm)
    frame = requests_frame([run])
    start, end = run.end.steady.start_ns, run.end.steady.end_ns
    for window, intended in frame.select("window", "intended_ns").iter_rows():
        expected = "warmup" if intended < start else "steady"
        assert window == (expected if intended < end else "drain")


def test_cached_tokens_that_are_left_out_are_none_if_others_have_them(
    arm: Path,
) -> None:
    """vLLM leaves a 0 out of the usage; a server that tells none leaves all out."""
    rows = [json.loads(line) for line in (arm / "replay.jsonl").open()]
    requests = rows[1:-1]
    for row in requests:
        row["cached_tokens"] = row["cached_tokens"] or None
    lines(arm / "replay.jsonl", rows)
    (run,) = read_run(arm)
    cached = requests_frame([run])["cached_tokens"]
    assert cached.to_list() == [row["cached_tokens"] or 0 for row in requests]
    for row in requests:
        row["cached_tokens"] = None
    lines(arm / "replay.jsonl", rows)
    (run,) = read_run(arm)
    assert requests_frame([run])["cached_tokens"].null_count() == len(requests)


def test_an_offload_counts_its_new_tokens_where_they_were_computed(arm: Path) -> None:
    """The serving instance calls what it was sent cached: usage says 0 new tokens."""
    rows = [json.loads(line) for line in (arm / "replay.jsonl").open()]
    third = next(row for row in rows if row.get("turn") == 3)
    third["prefill_instance"] = next(
        name for name in ("i0", "i1") if name != third["instance"]
    )
    third["cached_tokens"] = third["usage_prompt_tokens"]
    lines(arm / "replay.jsonl", rows)
    decisions = [json.loads(line) for line in (arm / "decisions.jsonl").open()]
    for decision in decisions[1:]:
        if decision["id"] == third["id"]:
            decision["prefill_instance"] = third["prefill_instance"]
    lines(arm / "decisions.jsonl", decisions)
    (run,) = read_run(arm)
    row = requests_frame([run]).filter(id=third["id"]).to_dicts()[0]
    assert row["new_tokens"] == third["usage_prompt_tokens"]


def test_an_offload_that_fell_back_is_none(arm: Path) -> None:
    rows = [json.loads(line) for line in (arm / "decisions.jsonl").open()]
    first = rows[1]
    first["prefill_instance"] = "i3"
    end = DecisionEnd(first["id"], first["number"], None, fallback="prefill timed out")
    lines(arm / "decisions.jsonl", [*rows, end])
    (run,) = read_run(arm)
    row = requests_frame([run]).filter(id=first["id"]).to_dicts()[0]
    assert row["prefill_instance"] is None
    assert row["fallback"] == "prefill timed out"


@pytest.mark.parametrize(
    ("new", "kind"),
    [
        (4_999, "WARM"),
        (5_000, "MEDIUM"),
        (20_000, "MEDIUM"),
        (20_001, "HEAVY"),
        (50_000, "HEAVY"),
        (50_001, "HUGE"),
    ],
)
def test_class_limits(new: int, kind: str) -> None:
    frame = pl.DataFrame({"new_tokens": [new], "decided_class": [None]})
    assert frame.select(size_class()).item() == kind


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Prompt, cached; new. A server that tells no cached tokens of one has none.
        ({"usage_prompt_tokens": 9_000, "cached_tokens": 3_000}, (6_000, "MEDIUM")),
        ({"usage_prompt_tokens": 7_000}, (7_000, "MEDIUM")),
        ({"usage_prompt_tokens": 7_000, "cached_tokens": 7_000}, (0, "WARM")),
        ({}, (None, None)),
    ],
)
def test_new_tokens_are_those_of_the_prompt_that_were_not_cached(
    fields, expected
) -> None:
    tells = ReplayedRequest(
        id="s/0", session="s", turn=0, usage_prompt_tokens=10, cached_tokens=5
    )
    request = ReplayedRequest(id="s/1", session="s", turn=1, **fields)
    frame = requests_frame([replace(NOTHING, requests=[tells, request])])
    assert frame.select("new_tokens", "class").row(1) == expected


@pytest.mark.parametrize(
    ("intended_ns", "window"),
    [
        (999, "warmup"),
        (1_000, "steady"),
        (1_999, "steady"),
        (2_000, "drain"),
        (None, None),
    ],
)
def test_the_steady_window_begins_with_its_start_and_ends_before_its_end(
    intended_ns, window
) -> None:
    request = ReplayedRequest(id="s/0", session="s", turn=0, intended_ns=intended_ns)
    end = ReplayEnd(
        scheduled=1, ok=1, failed=0, cancelled=0, steady=Steady(1_000, 2_000)
    )
    frame = requests_frame([replace(NOTHING, requests=[request], end=end)])
    assert frame["window"].item() == window


def test_no_run_is_an_empty_frame_with_all_columns() -> None:
    assert requests_frame([]).columns == requests_frame([NOTHING]).columns
