# SPDX-License-Identifier: Apache-2.0
"""The statistics of the step cost, on times whose quantiles are known."""

from __future__ import annotations

import numpy as np
import pytest

from costs.get_finished.step_cost import (
    AFTER,
    BUSY,
    QUIET,
    VARIANTS,
    quantile,
    report,
    rows,
)

ROUNDS, STEPS = 10, 200
CASES = (QUIET[0], BUSY[0])


def samples(get_finished_us: float) -> dict:
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
        for variant in VARIANTS
    }


def test_interval_of_a_quantile_is_as_wide_as_the_rounds_differ():
    steps = np.tile(np.arange(100.0), (20, 1))
    alike = quantile(steps, 0.5)
    assert alike.us == alike.ci95_us[0] == alike.ci95_us[1] == 49.5
    drifting = quantile(steps + np.arange(20.0)[:, None] * 10, 0.5)
    low_us, high_us = drifting.ci95_us
    assert low_us < 120 < drifting.us < 160 < high_us


def test_rows_hold_each_variant_in_each_case_with_its_own_times():
    found = rows(samples(2.0))
    assert len(found) == len(CASES) * len(VARIANTS)
    for row in found:
        assert (row.rounds, row.steps) == (ROUNDS, ROUNDS * STEPS)
        assert row.get_finished_us["p50"].us == pytest.approx(2.0, abs=0.01)
        assert row.step_us["p50"].us == pytest.approx(300, abs=1)
        assert row.step_us["p99"].us > row.step_us["p50"].us


@pytest.mark.parametrize(
    ("get_finished_us", "words"),
    [(0.5, ["met", "met"]), (2.0, ["missed", "met"]), (9.0, ["missed", "missed"])],
)
def test_aims_are_judged_for_the_short_circuit_when_nobody_is_busy(
    get_finished_us, words
):
    _, aims = report(rows(samples(get_finished_us))).split("\n\n")
    verdicts = [line.split("|")[-2].strip() for line in aims.splitlines()[2:]]
    assert verdicts == words
    assert AFTER in aims.splitlines()[0]
