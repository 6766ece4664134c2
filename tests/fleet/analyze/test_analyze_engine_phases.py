# SPDX-License-Identifier: Apache-2.0
"""The phases of an offload are those that both of its engines recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from analyze_runs import lines

from fleet.analyze.engine_phases import PHASES, engine_phases
from fleet.analyze.records import ArmRun
from lab.records import RecordsError
from lab.records.arm import ArmRecord
from lab.records.decisions import DecisionEnd, Offload
from lab.records.engine_requests import ids_of_completion

MS = 1_000_000
ID = "s%C3%A4/3"  # as the header had it


def engine(
    folder: Path, steps: dict[int, tuple[int, int]], *requests: dict, **header: object
) -> None:
    """`steps`: their first and last moment, in ms."""
    folder.mkdir(parents=True)
    told = {"schema": "kvtax.engine_step/1"} | header
    records = [
        {"step_id": step, "t_ns": begin * MS, "step_us": 1e3 * (end - begin)}
        for step, (begin, end) in steps.items()
    ]
    lines(folder / "engine_step.jsonl", [told, *records])
    told = {"schema": "kvtax.engine_request/1", "ids": "hashed"} | header
    lines(folder / "engine_request.jsonl", [told, *requests])


def request(arrival_ms: int, first: int, token: int, *waits_ms: int, **more) -> dict:
    return {
        "id": ids_of_completion(ID)[1],
        "arrival_ns": arrival_ms * MS,
        "prompt_tokens": 9,
        "first_step": first,
        "first_token_step": token,
        "kv_wait_ns": [one * MS for one in waits_ms],
    } | more


def run(folder: Path, **offload: object) -> ArmRun:
    told = Offload("p", 0, **offload)
    end = DecisionEnd(ID, 0, "sä", instance="d", prefill_instance="p", offload=told)
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
    assert [*row][2:] == list(PHASES)


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
