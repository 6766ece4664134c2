# SPDX-License-Identifier: Apache-2.0
"""`fleet.trace synth`: a made-up trace has the reuse and the means that it states."""

from __future__ import annotations

import pytest
from trace_commands import fails, header_of, run, stats

from fleet.trace import Request, read_trace


@pytest.mark.parametrize(
    "shape",
    [
        {"sessions": 80},
        {"sessions": 30, "seed": 5, "reuse": 0.8, "block-tokens": 16},
        {"sessions": 20, "turns": 60, "reuse": 0.95, "system-share": 0},
        {"sessions": 200, "turns": 3, "reuse": 0.6, "system-share": 1},
        {"sessions": 400, "max-input-tokens": 20_000, "reuse": 0.7},
    ],
)
def test_a_made_up_trace_has_the_stated_reuse(tmp_path, capsys, shape):
    out = tmp_path / "t.jsonl"
    options = [x for name, value in shape.items() for x in (f"--{name}", value)]
    assert run("synth", *options, "--out", out) == 0
    capsys.readouterr()
    found, stated = stats(capsys, out), header_of(out)
    source = stated["source"]
    assert found["intra_session_reuse"] == source["intra_session_reuse"]
    assert found["cross_session_reuse"] == source["cross_session_reuse"]
    # To the block.
    reuse = source["shape"]["reuse"]
    assert abs(found["intra_session_reuse"] - reuse) * found["blocks"] <= 1
    assert found["requests"] == stated["requests"]
    assert found["blocks"] == source["blocks"]


def test_agents_rewrite_their_context_but_not_the_system_prompt(tmp_path):
    out = tmp_path / "t.jsonl"
    assert (
        run("synth", "--sessions=30", "--system-share=1", "--reuse=.8", "--out", out)
        == 0
    )
    system = list(range(12_000 // 64))
    last: dict[str, list[int]] = {}
    rewritten = 0
    for request in read_trace(out):
        assert request.hashes[: len(system)] == system
        before = last.get(request.session, [])
        rewritten += request.hashes[: len(before)] != before
        last[request.session] = request.hashes
    assert rewritten > 0


def test_a_made_up_turn_comes_after_the_answer_and_the_think_time(tmp_path):
    out = tmp_path / "t.jsonl"
    assert run("synth", "--sessions=30", "--reuse=.8", "--out", out) == 0
    last: dict[str, Request] = {}
    for request in read_trace(out):
        before = last.get(request.session)
        assert (request.think_s is None) == (before is None)
        if before:
            gap_s = before.output_tokens / 50 + request.think_s
            assert request.arrival_s - before.arrival_s == pytest.approx(
                gap_s, abs=0.002
            )
            assert request.input_tokens > before.input_tokens + before.output_tokens
        last[request.session] = request


@pytest.mark.slow
def test_a_made_up_trace_has_the_stated_means(tmp_path, capsys):
    out = tmp_path / "t.jsonl"
    assert run("synth", "--sessions", 2000, "--block-tokens", 512, "--out", out) == 0
    capsys.readouterr()
    found = stats(capsys, out)
    assert found["sessions"] == 2000
    assert found["turns_per_session"]["mean"] == pytest.approx(20, rel=0.1)
    assert found["output_tokens"]["mean"] == pytest.approx(445, rel=0.05)
    assert found["think_s"]["mean"] == pytest.approx(15, rel=0.05)
    assert found["context_growth_tokens"]["mean"] == pytest.approx(1045, rel=0.05)
    assert found["input_tokens"]["max"] <= 131_072


def test_equal_shapes_give_equal_traces(tmp_path):
    traces = [tmp_path / name for name in ("a.gz", "b.gz")]
    for out in traces:
        assert run("synth", "--sessions", 20, "--seed", 3, "--out", out) == 0
    assert traces[0].read_bytes() == traces[1].read_bytes()


def test_a_reuse_out_of_reach_is_refused_with_the_range(tmp_path, capsys):
    out = ("--out", tmp_path / "t")
    few = ("--sessions", 100, "--turns", 2)
    fails(capsys, "out of reach: such sessions have 0.", "synth", *few, *out)
    fails(capsys, ">= 1", "synth", "--sessions", 0, *out)
    big = ("--sessions", 2, "--block-tokens", 1_000_000)
    fails(capsys, "no prompt has a whole block", "synth", *big, *out)
    assert not list(tmp_path.iterdir())
