# SPDX-License-Identifier: Apache-2.0
"""`python -m fleet.trace`: real traces, whole sessions, the stated reuse, no halves."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from fleet.trace import Request, own, read_trace
from fleet.trace.__main__ import main

TRACES = Path(__file__).resolve().parents[2] / "traces"
LE62K = TRACES / "claude_code_sessions_le62k.jsonl.gz"
ANY = TRACES / "claude_code_sessions_any.jsonl.gz"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl.gz"


@pytest.fixture(autouse=True)
def signals():
    """Commands take the signals over."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stats(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["stats", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def header_of(path: Path) -> dict:
    with path.open() as file:
        return json.loads(file.readline())


# What traces/README.md and the sources say of these files.
@pytest.mark.parametrize(
    ("file", "requests", "sessions", "blocks", "reuse"),
    [
        (MOONCAKE, 12_031, 12_031, 288_500, 0.366),
        (LE62K, 734, 44, 384_095, 0.919),
        pytest.param(ANY, 6_493, 124, 13_187_022, 0.961, marks=pytest.mark.slow),
    ],
)
def test_real_traces_are_as_their_readme_says(
    capsys, file, requests, sessions, blocks, reuse
):
    found = stats(capsys, file)
    assert (found["requests"], found["sessions"]) == (requests, sessions)
    assert found["blocks"] == blocks
    assert round(found["apc_infinite"], 3) == reuse
    assert found["distinct_blocks"] == round(blocks * (1 - found["apc_infinite"]))
    if file == MOONCAKE:
        assert found["intra_session_reuse"] == 0
    else:
        # Sub-agents of a session begin alike; sessions share nothing.
        assert found["cross_session_reuse"] < 0.001


def test_lengths_of_the_conversation_trace_are_as_published(capsys):
    found = stats(capsys, MOONCAKE)
    assert round(found["input_tokens"]["mean"]) == 12_035
    assert round(found["output_tokens"]["mean"]) == 343
    assert round(found["io_ratio"], 1) == 35.1


def test_a_cache_of_all_distinct_blocks_hits_what_an_infinite_one_does(capsys):
    distinct = stats(capsys, LE62K)["distinct_blocks"]
    full = stats(capsys, LE62K, "--cache-blocks", distinct)
    assert full["apc_lru"] == full["apc_infinite"]
    half = stats(capsys, LE62K, "--cache-blocks", distinct // 10)
    assert 0 < half["apc_lru"] < full["apc_lru"]


def test_sharing_prompts_moves_nothing_but_first_turns(capsys):
    alone, shared = stats(capsys, LE62K), stats(capsys, LE62K, "--share-prefix")
    assert shared["intra_session_reuse"] == alone["intra_session_reuse"]
    assert shared["cross_session_reuse"] > 0
    assert shared["distinct_blocks"] < alone["distinct_blocks"]


def trace_of(path: Path, turns: dict[str, list[tuple[float, int]]]) -> Path:
    """Sessions by name: arrivals and input tokens of their turns."""
    requests = [
        Request(arrival_s, name, turn, tokens, 10, [], 16, 1.0 if turn else None)
        for name, every in turns.items()
        for turn, (arrival_s, tokens) in enumerate(every)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    own.write(path, {"requests": len(requests)}, requests)
    return path


def test_turns_growth_and_shares_are_those_of_the_sessions(tmp_path, capsys):
    sessions = {f"s{n}": [(n, 4)] for n in range(6)}
    sessions["long"] = [(0.5, 5), (2.5, 9), (7.5, 16)]
    found = stats(capsys, trace_of(tmp_path / "t", sessions))
    assert found["turns_per_session"]["mean"] == pytest.approx(9 / 7)
    assert found["context_growth_tokens"] == {
        "n": 2,
        "mean": 5.5,
        "p50": 5.5,
        "p90": 6.7,
        "p99": 6.97,
        "max": 7.0,
    }
    assert found["top_sessions_share_of_requests"] == pytest.approx(7 / 9)
    assert found["top_sessions_share_of_input_tokens"] == pytest.approx(46 / 54)
    assert found["duration_s"] == 7.5


def test_stats_are_markdown_unless_told_otherwise(capsys):
    assert run("stats", LE62K, "--cache-blocks", 9000) == 0
    out = capsys.readouterr().out
    assert "| APC, infinite cache | 91.9 % |" in out
    assert "| APC, LRU cache of 9,000 blocks |" in out


def sample(out: Path, source: Path, requests: int, seed: int) -> list[Request]:
    assert (
        run(
            *("sample", source, "--target-requests", requests),
            *("--seed", seed, "--out", out),
        )
        == 0
    )
    return list(read_trace(out))


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_has_whole_sessions_in_order_and_says_what_it_is(tmp_path, seed):
    out = tmp_path / "cut.jsonl"
    cut = sample(out, LE62K, 200, seed)
    whole = list(read_trace(LE62K))
    chosen = {request.session for request in cut}
    assert cut == [request for request in whole if request.session in chosen]
    sizes = Counter(request.session for request in cut)
    assert 200 <= len(cut) < 200 + max(sizes.values())
    head = header_of(out)
    assert head["requests"] == len(cut)
    assert head["source"] == {
        "made_by": "fleet.trace sample",
        "file": LE62K.name,
        "sha256": hashlib.sha256(LE62K.read_bytes()).hexdigest(),
        "read_with": {
            "format": None,
            "block_tokens": None,
            "session_interval_s": 60.0,
            "share_prefix": False,
        },
        "target_requests": 200,
        "seed": seed,
        "requests": 734,
        "sessions": 44,
        "sessions_chosen": len(chosen),
    }


def test_equal_seeds_give_equal_samples_and_others_others(tmp_path):
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    sample(first, LE62K, 200, 7)
    sample(second, LE62K, 200, 7)
    sample(other, LE62K, 200, 8)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_every_session_has_the_same_chance(tmp_path, capsys):
    source = trace_of(tmp_path / "t", {f"s{n}": [(n, 4)] for n in range(40)})
    taken: Counter[str] = Counter()
    for seed in range(200):
        taken.update(r.session for r in sample(tmp_path / "cut", source, 10, seed))
    assert sum(taken.values()) == 2000
    # 200 draws of a quarter: 50, with a standard deviation of 6.1.
    assert min(taken[f"s{n}"] for n in range(40)) > 50 - 4 * 6.1
    assert max(taken.values()) < 50 + 4 * 6.1


def test_a_session_takes_its_sub_agents_along(tmp_path):
    requests = [
        Request(float(n), name, 0, 4, 1, [], 16, None, parent)
        for n in range(40)
        for name, parent in [
            (f"{n}", None),
            (f"{n}.x", f"{n}"),
            (f"{n}.x.y", f"{n}.x"),
        ]
    ]
    own.write(tmp_path / "t", {"requests": len(requests)}, requests)
    for seed in range(5):
        cut = sample(tmp_path / "cut", tmp_path / "t", 30, seed)
        roots = Counter(request.session.split(".")[0] for request in cut)
        assert set(roots.values()) == {3}


def fails(capsys, says: str, *arguments: object) -> None:
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert captured.out == ""


def test_more_than_there_is_cannot_be_sampled(tmp_path, capsys):
    more = ("--target-requests", 735, "--seed", 0, "--out", tmp_path / "cut")
    fails(capsys, "735 requests wanted of 734", "sample", LE62K, *more)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_of_a_torn_trace(tmp_path, capsys):
    torn = tmp_path / "torn.gz"
    torn.write_bytes(MOONCAKE.read_bytes()[:-500])
    rest = ("--target-requests", 5, "--seed", 0, "--out", tmp_path / "cut")
    fails(capsys, "torn gzip data", "sample", torn, *rest)
    fails(capsys, "torn gzip data", "stats", torn)
    assert list(tmp_path.iterdir()) == [torn]


def test_an_output_that_cannot_be_written_is_an_error(tmp_path, capsys):
    out = tmp_path / "nowhere" / "t"
    fails(capsys, "No such file", "synth", "--sessions", 3, "--out", out)


def test_an_older_output_stays_if_writing_fails(tmp_path):
    out = tmp_path / "t"
    out.write_text("older")
    with pytest.raises(own.TraceError, match="1 requests came, 2 were counted"):
        own.write(out, {"requests": 2}, [Request(0.0, "a", 0, 1, 1, [], 16)])
    assert out.read_text() == "older"
    assert list(tmp_path.iterdir()) == [out]


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_command_leaves_no_partial_trace(tmp_path, number):
    out = tmp_path / "t.jsonl"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fleet.trace",
            "synth",
            "--sessions=100000",
            "--out",
            out,
        ]
    )
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 1 << 20 for p in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert not list(tmp_path.iterdir())
