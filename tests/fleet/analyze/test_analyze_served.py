# SPDX-License-Identifier: Apache-2.0
"""Behind a router that is not ours, the instances say who served a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from analyze_runs import INSTANCES, MODEL, Truth, lines, write_run

from fleet.analyze.analysis import analyse
from fleet.analyze.records import ArmRun, read_arm, read_run
from fleet.analyze.report import write_report
from lab.records.arm import ArmRecord
from lab.records.documents import read_document, write_document
from lab.records.engine_requests import ids_of_completion
from lab.records.replay import in_header

ROUTER = "vllm-router 0.0.1"


def behind_another_router(folder: Path, hashed: bool | None) -> dict[str, str]:
    """Take from a run what only our proxy tells. The instance of each request by id.

    The instances recorded their requests, with ids that are `hashed` or not; None: they
    recorded nothing.
    """
    (folder / "decisions.jsonl").unlink()
    info = read_document(folder / "arm.json", ArmRecord)
    write_document(folder / "arm.json", msgspec.structs.replace(info, router=ROUTER))
    header, *requests, end = (folder / "replay.jsonl").read_text().splitlines()
    requests = [msgspec.json.decode(line) for line in requests]
    served = {one["id"]: one.pop("instance") for one in requests}
    lines(
        folder / "replay.jsonl",
        [msgspec.Raw(header.encode()), *requests, msgspec.Raw(end.encode())],
    )
    for name in INSTANCES if hashed is not None else ():
        (folder / "instances" / name).mkdir(parents=True)
        told = {"schema": "kvtax.engine_request/1"}
        told["ids"] = "hashed" if hashed else "plain"
        own = [recorded(id_, hashed) for id_, by in served.items() if by == name]
        lines(folder / "instances" / name / "engine_request.jsonl", [told, *own])
    return served


def recorded(id_: str, hashed: bool, arrival_ns: int = 10) -> dict:
    known = ids_of_completion(in_header(id_))[hashed]
    return {"id": known, "arrival_ns": arrival_ns, "prompt_tokens": 9}


def one_run(tmp_path: Path) -> Path:
    write_run(tmp_path, [Truth("linear", repeats=1)])
    return tmp_path / "linear" / "r0"


def served_by(run: ArmRun) -> dict[str, str | None]:
    return {request.id: request.instance for request in run.requests}


@pytest.mark.parametrize("hashed", [True, False])
def test_each_request_is_placed_where_it_was_recorded(tmp_path, hashed):
    folder = one_run(tmp_path)
    served = behind_another_router(folder, hashed)
    assert len(set(served.values())) > 1
    assert served_by(read_arm(folder)) == served


def test_a_request_that_was_sent_twice_is_placed_where_it_came_last(tmp_path):
    folder = one_run(tmp_path)
    served = behind_another_router(folder, hashed=True)
    moved = next(id_ for id_, by in served.items() if by != INSTANCES[0])
    with (folder / "instances" / INSTANCES[0] / "engine_request.jsonl").open("ab") as f:
        f.write(msgspec.json.encode(recorded(moved, True, arrival_ns=20)) + b"\n")
    assert served_by(read_arm(folder)) == served | {moved: INSTANCES[0]}


def with_another_router(tmp_path: Path, hashed: bool | None) -> tuple[dict, str]:
    ours = Truth("linear")
    write_run(tmp_path, [ours, replace(ours, arm="theirs")])
    for repeat in range(ours.repeats):
        behind_another_router(tmp_path / "theirs" / f"r{repeat}", hashed)
    document = analyse(read_run(tmp_path), MODEL, 100.0).document
    return document, write_report(document, [])


def test_it_is_measured_as_ours_but_for_what_only_our_proxy_knows(tmp_path):
    """The same requests served alike: all that is not the proxy's word is the same."""
    document, report = with_another_router(tmp_path, hashed=True)
    ours, theirs = document["arms"]["linear"], document["arms"]["theirs"]
    for mine, other in zip(ours["repeats"], theirs["repeats"], strict=True):
        same = ("apc", "kv_blocks")
        assert {key: mine[key] for key in same} == {key: other[key] for key in same}
        assert mine["imbalance"] == other["imbalance"]
    assert all(repeat["hotspot"] for repeat in theirs["repeats"])
    assert theirs["interference"] is not None
    assert ours["belief"] and ours["offline"]
    assert theirs["belief"] is theirs["offline"] is None
    (compared,) = document["comparisons"]
    assert compared["refused"] == [] and not compared["same"]
    assert f"`theirs` ran behind {ROUTER}, which records no decisions" in report
    assert "from the instances' own records" in report


def test_without_records_of_the_instances_there_is_no_balance_and_the_report_says_so(
    tmp_path,
):
    document, report = with_another_router(tmp_path, hashed=None)
    for repeat in document["arms"]["theirs"]["repeats"]:
        assert repeat["imbalance"] == {"tokens": {}, "max_over_min": None}
        assert repeat["hotspot"] is repeat["accumulation"] is None
    assert "which instance served a request is not known" in report
    (compared,) = document["comparisons"]
    assert compared["refused"] == []
