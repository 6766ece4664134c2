# SPDX-License-Identifier: Apache-2.0
"""`fleet.trace sample`: whole sessions, each with the same chance."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from trace_commands import LE62K, fails, header_of, run, trace_of

from fleet.trace import Request, own, read_trace


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
            "chars_per_token": 4.0,
            "tokenizer": None,
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


def test_more_than_there_is_cannot_be_sampled(tmp_path, capsys):
    more = ("--target-requests", 735, "--seed", 0, "--out", tmp_path / "cut")
    fails(capsys, "735 requests wanted of 734", "sample", LE62K, *more)
    assert not list(tmp_path.iterdir())
