# SPDX-License-Identifier: Apache-2.0
"""The committed answers in virtual time are near those in real time."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from kvtax.records.files import read_document

from kvtax_fleet.analyze.analysis import FleetAnalysis
from kvtax_fleet.paths import FLEET

RESULTS = FLEET / "results"
VIRTUAL = FLEET / "tests" / "data" / "virtual"
EXPERIMENTS = (
    "policies",
    "concurrency",
    "elastic",
    "substrate",
    "exact",
    "disaggregation",
    "elastic_loaded",
    "nixl",
    "open_loop",
)
# Of the prompt tokens, between the ranges of repeats: in real time two repeats of an
# arm differ by up to 5.2 points.
NEAR_POINTS = 1.5
# Of real times: equal fleets differ by up to 52 %.
CLEARLY = 1.6


def arms(folder: Path) -> dict:
    analysis = read_document(folder / "analysis.json", FleetAnalysis)
    return msgspec.to_builtins(analysis.arms)


@pytest.fixture(params=EXPERIMENTS)
def both(request: pytest.FixtureRequest) -> tuple[dict, dict]:
    """The arms in real and in virtual time."""
    real = arms(RESULTS / request.param)
    virtual = arms(VIRTUAL / request.param)
    assert set(real) == set(virtual)
    return real, virtual


def test_as_much_is_found_cached(both: tuple[dict, dict]) -> None:
    real, virtual = both
    apart = {
        arm: points
        for arm in real
        if (points := points_apart(real[arm], virtual[arm])) > NEAR_POINTS
    }
    assert apart == {}


def points_apart(one: dict, other: dict) -> float:
    """Between the ranges of their repeats."""
    here, there = (
        [100 * repeat["apc"]["overall"]["apc_usage"] for repeat in arm["repeats"]]
        for arm in (one, other)
    )
    return max(0.0, min(here) - max(there), min(there) - max(here))


@pytest.mark.parametrize("metric", ["ttft_ms", "tpot_ms", "e2e_ms"])
def test_what_is_clearly_slower_is_slower(both: tuple[dict, dict], metric: str) -> None:
    """At p90, where real times at one concurrency differ by more than equal fleets'."""

    def level(arms: dict, arm: str) -> float:
        return arms[arm]["latency"]["all"]["all"][metric]["p90"]["value"]

    real, virtual = both
    for one, other in permutations(real, 2):
        same = real[one]["concurrency"] == real[other]["concurrency"]
        if same and level(real, one) > CLEARLY * level(real, other):
            assert level(virtual, one) > level(virtual, other), (one, other)
