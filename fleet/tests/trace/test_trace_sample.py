# SPDX-License-Identifier: Apache-2.0
"""A sample has whole sessions, which its seed alone decides."""

from __future__ import annotations

from collections import Counter

import pytest
from fleet.tests.trace.trace_commands import LE62K, fails, run, trace_of
from hypothesis import given
from hypothesis import strategies as st

from kvtax_fleet.trace import Request, TraceError, read_trace
from kvtax_fleet.trace.sample import sample

# The parent of each session, if it has one before it.
FAMILIES = st.lists(
    st.tuples(st.integers(1, 4), st.none() | st.integers(0, 30)), min_size=1
)


def requests_of(families: list[tuple[int, int | None]]) -> list[Request]:
    requests = []
    for place, (turns, parent) in enumerate(families):
        root = None if parent is None or parent >= place else f"s{parent}"
        for turn in range(turns):
            own = root if turn == 0 else None
            requests.append(
                Request(turn, f"s{place}", turn, 1, 1, [], 16, float(turn), own)
            )
    return sorted(requests, key=lambda request: request.arrival_s)


@given(FAMILIES, st.integers(0, 9), st.data())
def test_families_are_taken_whole_up_to_the_wanted_number(families, seed, data):
    requests = requests_of(families)
    wanted = data.draw(st.integers(1, len(requests)))
    taken = sample(requests, wanted, seed)
    assert taken == sample(requests, wanted, seed)
    assert len(taken) >= wanted
    assert taken == [request for request in requests if request in taken]
    counts = Counter(request.session for request in requests)
    sessions = Counter(request.session for request in taken)
    assert all(counts[name] == count for name, count in sessions.items())
    parents = {each.session: each.parent for each in requests if each.parent}
    for child, parent in parents.items():
        assert (child in sessions) == (parent in sessions)


def test_another_seed_takes_other_sessions():
    requests = list(read_trace(LE62K))
    names = [
        {request.session for request in sample(requests, 200, seed)} for seed in (0, 1)
    ]
    assert names[0] != names[1]


def test_a_trace_that_is_too_short_is_named():
    with pytest.raises(TraceError, match=r"--requests 3: the trace has 2"):
        sample(requests_of([(2, None)]), 3, 0)


def test_the_command_writes_the_sample_and_prints_its_figures(tmp_path, capsys):
    source = trace_of(tmp_path / "t", {"a": [(0, 16), (1, 16)], "b": [(2, 16)]})
    out = tmp_path / "sample.jsonl.xz"
    assert run("sample", source, out, "--requests", 3, "--seed", 1) == 0
    assert list(read_trace(out)) == list(read_trace(source))
    printed = capsys.readouterr().out
    assert "3 of 3 requests" in printed
    assert "APC, infinite cache" in printed
    fails(capsys, "the trace has 3", "sample", source, out, "--requests", 4)
