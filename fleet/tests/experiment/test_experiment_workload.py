# SPDX-License-Identifier: Apache-2.0
"""The load of an experiment: the declared cuts of a trace, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from kvtax_fleet.experiment.config import Workload
from kvtax_fleet.experiment.workload import make_workload
from kvtax_fleet.trace import Request, TraceError, read_trace, write_trace


def source(folder: Path, sessions: int, turns: int) -> Path:
    path = folder / "source.jsonl"
    requests = [
        Request(
            arrival_s=float(session + turn),
            session=f"s{session}",
            turn=turn,
            input_tokens=16 * (turn + 1),
            output_tokens=50,
            hashes=[session * 100 + block for block in range(turn + 1)],
            block_tokens=16,
            think_s=None if turn == 0 else 9.0,
        )
        for session in range(sessions)
        for turn in range(turns)
    ]
    requests.sort(key=lambda each: each.arrival_s)
    write_trace(path, {"requests": len(requests)}, requests)
    return path


def load(folder: Path, workload: Workload, closed_loop: bool = True, seed: int = 0):
    path = source(folder, sessions=6, turns=4)
    workload = msgspec.structs.replace(workload, trace=str(path))
    facts = make_workload(workload, folder / "out.jsonl", closed_loop, seed)
    return facts, list(read_trace(folder / "out.jsonl"))


def test_whole_sessions_are_drawn_and_the_cuts_are_what_was_declared(tmp_path):
    workload = Workload(
        "t", sessions=3, max_turns=2, max_output_tokens=7, max_think_s=1.0
    )
    facts, requests = load(tmp_path, workload)
    turns = defaultdict(list)
    for each in requests:
        turns[each.session].append(each.turn)
        assert each.output_tokens == 7
        assert each.think_s == (None if each.turn == 0 else 1.0)
    assert list(turns.values()) == [[0, 1]] * 3
    assert (facts.sessions, facts.requests) == (3, 6)
    assert facts.input_tokens == sum(each.input_tokens for each in requests)


def test_equal_seeds_give_equal_loads_and_others_do_not(tmp_path):
    workload = Workload("t", sessions=3)
    hashes = [load(tmp_path, workload, seed=seed)[0].sha256 for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_copies_share_no_block_with_each_other(tmp_path):
    facts, requests = load(tmp_path, Workload("t", copies=3))
    assert facts.sessions == 18
    blocks = defaultdict(set)
    for each in requests:
        blocks[each.session] |= set(each.hashes)
    everyone = [block for own in blocks.values() for block in own]
    assert len(everyone) == len(set(everyone))


def test_a_closed_loop_has_everyone_at_the_gate_and_an_open_one_keeps_arrivals(
    tmp_path,
):
    assert {each.arrival_s for each in load(tmp_path, Workload("t"))[1]} == {0.0}
    _, kept = load(tmp_path, Workload("t"), closed_loop=False)
    assert [each.arrival_s for each in kept] == sorted(
        each.arrival_s for each in read_trace(tmp_path / "source.jsonl")
    )


def test_the_first_requests_are_a_beginning_of_the_trace(tmp_path):
    facts, requests = load(tmp_path, Workload("t", requests=7), closed_loop=False)
    requests.sort(key=lambda each: (each.arrival_s, each.session))
    first = list(read_trace(tmp_path / "source.jsonl"))[:7]
    assert requests == first
    assert facts.requests == 7


def test_more_sessions_than_there_are_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"6 sessions where .* 7"):
        load(tmp_path, Workload("t", sessions=7))
