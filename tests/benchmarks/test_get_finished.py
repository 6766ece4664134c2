# SPDX-License-Identifier: Apache-2.0
"""The statistics of the step cost, on times whose quantiles are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.get_finished import AFTER, BEFORE, BUSY, QUIET, VARIANTS, report, rows

pytestmark = pytest.mark.slow

ROUNDS, STEPS = 10, 50
CASES = (QUIET[0], BUSY[0])


def samples(get_finished_us: float, variants=VARIANTS) -> dict:
    rng = np.random.default_rng(1)
    return {
        (case, variant): np.stack(
            [
                rng.normal(get_finished_us, 0.01, (ROUNDS, STEPS)),
                rng.normal(300, 5, (ROUNDS, STEPS)),
            ],
            axis=1,
        )
        for case in CASES
        for variant in variants
    }


def test_rows_hold_each_variant_in_each_case_with_its_own_times():
    found = rows(samples(2.0))
    assert len(found) == len(CASES) * len(VARIANTS)
    for row in found:
        assert (row.rounds, row.steps) == (ROUNDS, ROUNDS * STEPS)
        assert row.get_finished_us["p50"].value == pytest.approx(2.0, abs=0.01)
        assert row.step_us["p50"].value == pytest.approx(300, abs=1)
        assert row.step_us["p99"].value > row.step_us["p50"].value


@pytest.mark.parametrize(
    ("get_finished_us", "words"),
    [(0.5, ["met", "met"]), (2.0, ["missed", "met"]), (9.0, ["missed", "missed"])],
)
def test_aims_are_judged_for_the_short_circuit_when_nobody_is_busy(
    get_finished_us, words
):
    _, aims = report(rows(samples(get_finished_us, (BEFORE, AFTER))))
    rows_of_aims = aims.splitlines()[2:]
    assert [row.split("|")[-2].strip() for row in rows_of_aims] == words
    assert all(f"{AFTER}, {QUIET[0].batch} running" in row for row in rows_of_aims)
