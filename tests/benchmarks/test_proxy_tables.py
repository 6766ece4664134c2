# SPDX-License-Identifier: Apache-2.0
"""Tables of the proxy's benchmark, on a machine that gets slower."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.proxy import DIRECT, added, added_table, rates_table
from benchmarks.proxy_targets import BODIES
from kvtax.stats import resampling

ROUNDS = 12


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """No figure here is near the end of an interval."""
    monkeypatch.setattr(resampling, "ROUND_REPLICATES", 100)


def answers() -> dict:
    """Times in ms of a machine that gets slower; the proxy adds 1.5 ms to all."""
    rng = np.random.default_rng(1)
    found = {}
    for body in BODIES:
        direct = [list(rng.normal(1 + r / 10, 0.05, 40)) for r in range(ROUNDS)]
        found[DIRECT, body] = direct
        found["proxy", body] = [[ms + 1.5 for ms in of_round] for of_round in direct]
    return found


@pytest.mark.parametrize("percent", [50, 99])
def test_what_is_added_is_the_difference_whatever_the_machine_does(percent):
    found = added(answers(), "proxy", "small", percent)
    assert found.value == pytest.approx(1.5)
    assert found.ci95 == pytest.approx((1.5, 1.5))


def test_each_target_has_a_row_for_each_body():
    rows = added_table(answers(), ["proxy"]).splitlines()[2:]
    assert len(rows) == len(BODIES)
    assert all("+1.50 [+1.50, +1.50]" in row for row in rows)


def test_rates_are_medians_of_the_rounds_with_their_range():
    rounds = [[1_000.0, 9.0], [3_000.0, 7.0], [2_000.0, 8.0]]
    rates = {("proxy", body): rounds for body in BODIES}
    assert "2,000 [1,000, 3,000]" in rates_table(rates, ["proxy"], 0)
    assert "8 [7, 9]" in rates_table(rates, ["proxy"], 1)
