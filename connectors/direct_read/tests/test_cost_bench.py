# SPDX-License-Identifier: Apache-2.0
"""What the cost bench of direct reads says of samples whose truth is known."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from connectors.direct_read.bench.cost import (
    AGAIN,
    IDLE,
    IDLE_AGAIN,
    NOOP,
    Chunk,
    Reads,
    Row,
    Size,
    control,
    cost_of_one_ms,
    judged,
    report,
    rows_of,
)
from kvtax.paths import REPOSITORY

ROUNDS, STEPS = 8, 200
READS = "10 reads/s"


def chunk(rng: np.random.Generator, us: float) -> Chunk:
    step_us = rng.normal(us, us / 1_000, STEPS)
    seconds = float(step_us.sum()) / 1e6
    return Chunk(step_us, seconds, {"engine": seconds, "side channel": 0.01}, 20_500)


def load() -> Reads:
    part = np.full(10, 1_000.0)
    return Reads(640, 608, 1.0, 0.1, part, part, part)


def samples(idle: float = 1.0, again: float = 1.0, reads: float = 1.0) -> dict:
    """Costs in shares of the no-op connector's; the reader costs 5 % by running."""
    rng = np.random.default_rng(1)
    us = {NOOP: 300, AGAIN: 300 * again, IDLE: 300 * idle, IDLE_AGAIN: 300 * idle}
    us |= {READS: 315 * idle * reads, control(READS): 315 * idle}
    drift = rng.uniform(1, 2, ROUNDS)
    return {
        name: [
            (chunk(rng, mean * slow), load() if READS in name else None)
            for slow in drift
        ]
        for name, mean in us.items()
    }


def test_ratios_are_those_within_a_round_however_the_machine_drifts():
    rows = {row.name: row for row in rows_of(samples(idle=1.01, reads=1.03))}
    assert set(rows) == {NOOP, AGAIN, IDLE, IDLE_AGAIN, READS}
    reads = rows[READS]
    assert reads.to_control.value == pytest.approx(1.03, abs=1e-3)
    assert reads.to_idle.value == pytest.approx(1.05 * 1.03, abs=1e-3)
    assert rows[IDLE].to_noop.value == pytest.approx(1.01, abs=1e-3)
    for row in rows.values():
        for one in (row.to_noop, row.to_idle):
            assert one.ci95[0] <= one.value <= one.ci95[1]
    assert reads.served.per_s == pytest.approx(10)
    assert reads.served.valid_share == pytest.approx(0.95)
    assert reads.served.whole_ms["p50"] == pytest.approx(3.0)


def words(found: list[Row]) -> list[str]:
    """Of the aims: idle's first."""
    return [line.split("|")[-2].strip() for line in judged(found).splitlines()[2:]]


@pytest.mark.parametrize(
    ("idle", "again", "word"),
    [(1.0, 1.01, "met"), (1.05, 1.01, "missed"), (1.005, 1.02, "met")],
)
def test_idle_is_judged_by_how_far_two_of_the_same_are_apart(idle, again, word):
    assert words(rows_of(samples(idle=idle, again=again)))[0] == word


@pytest.mark.parametrize(("reads", "word"), [(1.01, "met"), (1.04, "missed")])
def test_being_read_is_judged_by_what_it_costs_beyond_the_readers_running(reads, word):
    assert words(rows_of(samples(reads=reads)))[1:] == [word]


def test_what_one_read_costs_is_the_time_lost_over_their_rate():
    (row,) = (r for r in rows_of(samples(reads=1.25)) if r.name == READS)
    # A fifth of the time, ten times a second.
    assert cost_of_one_ms(row).startswith("20.0")
    none = msgspec.structs.replace(row.served, per_s=0.0)
    assert cost_of_one_ms(msgspec.structs.replace(row, served=none)).startswith("no r")


def test_the_text_has_each_size_with_its_own_rows():
    small, large = (rows_of(samples(reads=r)) for r in (1.01, 1.04))
    sizes = [Size(20_000, small, {NOOP: 0.25}), Size(200_000, large, {NOOP: 0.25})]
    _, first, *_, of_small, _, second, _, of_large, _, _, _ = report(sizes, 0)
    assert first.startswith("## 20,000 blocks") and of_small == judged(small)
    assert second.startswith("## 200,000 blocks") and of_large == judged(large)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--rounds", "2"], ["--steps", "10"], ["--blocks", "100"]]
)
def test_too_little_to_say_anything_is_refused(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "direct_read_cost", *arguments],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 2
    assert "at least" in done.stderr


@pytest.mark.long
def test_a_small_run_serves_what_is_asked_for_and_writes_it_down(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "direct_read_cost"]
    command += ["--rounds", "6", "--steps", "200", "--blocks", "8192"]
    command += ["--out", tmp_path / "cost.md"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    found = json.loads((tmp_path / "cost.json").read_text())
    (size,) = found["sizes"]
    assert all(row["cached_blocks"] >= 8_192 for row in size["rows"])
    served = {row["name"]: row["served"] for row in size["rows"] if row["served"]}
    assert all(one["per_s"] > 0 for one in served.values())
    shares = [one["valid_share"] for name, one in served.items() if "reads" in name]
    assert len(shares) == 3 and min(shares) > 0.99
    assert "noise floor" in (tmp_path / "cost.md").read_text()


@pytest.mark.long
def test_a_small_run_of_transfers_finds_all_blocks_valid(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "direct_read_transfer"]
    command += ["--rounds", "8", "--out", tmp_path / "transfer.md"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    rows = json.loads((tmp_path / "transfer.json").read_text())["rows"]
    assert len(rows) == 18
    for row in rows:
        assert row["valid_share"] == 1
        # In one run, also backwards; of the scattered ones, a quarter has a neighbour.
        scattered = row["case"][1] == "scattered"
        assert row["runs"] > 0.6 * row["case"][2] if scattered else row["runs"] == 1
        assert row["gb_per_s"]["connector"] > 0
