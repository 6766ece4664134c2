# SPDX-License-Identifier: Apache-2.0
"""`kvtax trace sample`, `synth` and `study-sample` make what they state."""

from __future__ import annotations

import hashlib
import lzma
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fleet.tests.trace.trace_commands import (
    LE62K,
    fails,
    header_of,
    run,
    stats,
    trace_of,
)
from studies.reference_study.sample import FIRST, figures, new_tokens

from kvtax_fleet.policies.decision import HEAVY_ABOVE_TOKENS, HUGE_ABOVE_TOKENS
from kvtax_fleet.trace import Request, read_trace, write_trace
from kvtax_fleet.trace.sample import sample
from kvtax_fleet.trace.study_sample import StudySample, sampled_requests
from kvtax_fleet.trace.synth import Shape, synth

pytestmark = pytest.mark.usefixtures("signals")

MAKERS = [
    ("sample", LE62K, "--target-requests", 200),
    ("synth", "--sessions", 20),
    ("study-sample", "--requests", 300),
]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker[0])
def test_equal_seeds_give_equal_traces_and_others_others(tmp_path, maker):
    def made(name: str, seed: int) -> bytes:
        assert run(*maker, "--seed", seed, "--out", tmp_path / name) == 0
        return (tmp_path / name).read_bytes()

    assert made("a.gz", 3) == made("b.gz", 3) != made("c.gz", 4)


@pytest.mark.parametrize(
    ("maker", "says"),
    [
        (
            ("sample", LE62K, "--target-requests", 735, "--seed", 0),
            "735 requests wanted of 734",
        ),
        (("synth", "--sessions", 100, "--turns", 2), "of reach: such sessions have 0."),
        (("synth", "--sessions", 0), ">= 1"),
        (("synth", "--sessions", 2, "--block-tokens", 10**6), "has a whole block"),
        (("study-sample", "--requests", 1_001), "<= 1000"),
    ],
)
def test_what_cannot_be_made_is_refused_and_leaves_nothing(
    tmp_path, capsys, maker, says
):
    fails(capsys, says, *maker, "--out", tmp_path / "t")
    assert not list(tmp_path.iterdir())


def take_sample(out: Path, source: Path, requests: int, seed: int) -> list[Request]:
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
    cut = take_sample(out, LE62K, 200, seed)
    whole = list(read_trace(LE62K))
    chosen = {request.session for request in cut}
    assert cut == [request for request in whole if request.session in chosen]
    sizes = Counter(request.session for request in cut)
    assert 200 <= len(cut) < 200 + max(sizes.values())
    head = header_of(out)
    assert head["requests"] == len(cut)
    assert head["source"] == {
        "made_by": "kvtax trace sample",
        "file": LE62K.name,
        "sha256": hashlib.sha256(lzma.decompress(LE62K.read_bytes())).hexdigest(),
        "read_with": {
            "format": None,
            "block_tokens": None,
            "session_interval_s": 60.0,
            "share_prefix": False,
            "chars_per_token": 4.0,
            "tokenizer": None,
            "time_unit": None,
            "left_out": None,
        },
        "target_requests": 200,
        "seed": seed,
        "requests": 734,
        "sessions": 44,
        "sessions_chosen": len(chosen),
    }


@pytest.mark.slow
def test_every_session_has_the_same_chance(tmp_path):
    source, cut = tmp_path / "t", tmp_path / "cut"
    requests = list(
        read_trace(trace_of(source, {f"s{n}": [(n, 4)] for n in range(40)}))
    )
    options = {"target_requests": 10, "read": partial(iter, requests), "options": {}}
    taken: Counter[str] = Counter()
    for seed in range(200):
        sample(source, cut, seed=seed, **options)
        taken.update(request.session for request in read_trace(cut))
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
    write_trace(tmp_path / "t", {"requests": len(requests)}, requests)
    for seed in range(5):
        cut = take_sample(tmp_path / "cut", tmp_path / "t", 30, seed)
        roots = Counter(request.session.split(".")[0] for request in cut)
        assert set(roots.values()) == {3}


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


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> list[Request]:
    out = tmp_path_factory.mktemp("synth") / "t.jsonl"
    synth(Shape(sessions=30, system_share=1, reuse=0.8), out)
    return list(read_trace(out))


def test_agents_rewrite_their_context_but_not_the_system_prompt(made_up):
    system = list(range(12_000 // 64))
    last: dict[str, list[int]] = {}
    rewritten = 0
    for request in made_up:
        assert request.hashes[: len(system)] == system
        before = last.get(request.session, [])
        rewritten += request.hashes[: len(before)] != before
        last[request.session] = request.hashes
    assert rewritten > 0


def test_a_made_up_turn_comes_after_the_answer_and_the_think_time(made_up):
    last: dict[str, Request] = {}
    for request in made_up:
        before = last.get(request.session)
        assert (request.think_s is None) == (before is None)
        if before:
            gap_s = before.output_tokens / 50 + request.think_s
            came_s = request.arrival_s - before.arrival_s
            assert came_s == pytest.approx(gap_s, abs=0.002)
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


@pytest.mark.parametrize("seed", [42, 0, 1])
def test_the_study_s_sample_has_every_figure_within_its_tolerance(seed):
    """Of other seeds the first 200 are another draw of the same population."""
    found = figures(sampled_requests(StudySample(seed=seed)))
    held = [figure for figure in found if figure.tolerance is not None]
    assert len(held) == len(found) - 1
    off = {
        (figure.population, figure.name): figure.here
        for figure in held
        if abs(figure.here - figure.study) > figure.tolerance
        and (seed == 42 or figure.population != FIRST)
    }
    assert off == {}


@pytest.mark.parametrize("seed", [42, 0, 1])
def test_the_study_s_sample_is_one_population(seed):
    """Each fifth has the same classes, but for chance and what sessions grow to."""
    new = new_tokens(sampled_requests(StudySample(seed=seed)))
    for first in range(0, 1_000, 200):
        part = new[first : first + 200]
        huge = sum(tokens > HUGE_ABOVE_TOKENS for tokens in part) / 200
        heavy = sum(tokens > HEAVY_ABOVE_TOKENS for tokens in part) / 200
        assert 0.1 < huge < 0.22
        assert 0.35 < heavy < 0.55


def test_a_part_of_the_study_s_sample_is_its_beginning():
    whole = sampled_requests(StudySample())
    assert sampled_requests(StudySample(requests=200)) == whole[:200]
