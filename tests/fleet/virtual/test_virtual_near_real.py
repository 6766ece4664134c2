# SPDX-License-Identifier: Apache-2.0
"""The committed answers in virtual time are near those in real time."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import msgspec
import pytest

from fleet.analyze.beside import cached_share
from lab.paths import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"
EXPERIMENTS = ("policies", "concurrency", "elastic", "substrate")
# Of the prompt tokens. Equal runs in real time differ by up to 1.1 points.
NEAR_POINTS = 1.5
# Of real times: equal fleets differ by up to 52 %.
CLEARLY = 1.6


def arms(folder: Path) -> dict:
    return msgspec.json.decode((folder / "analysis.json").read_bytes())["arms"]


@pytest.fixture(params=EXPERIMENTS)
def both(request: pytest.FixtureRequest) -> tuple[dict, dict]:
    """The arms in real and in virtual time."""
    real = arms(RESULTS / f"fleet-{request.param}")
    virtual = arms(RESULTS / f"virtual-{request.param}")
    assert set(real) == set(virtual)
    return real, virtual


def test_as_much_is_found_cached(both: tuple[dict, dict]) -> None:
    real, virtual = both
    apart = {
        arm: points
        for arm in real
        if abs(points := 100 * (cached_share(virtual[arm]) - cached_share(real[arm])))
        > NEAR_POINTS
    }
    assert apart == {}


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
