# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.exposure says is what its cells saw."""

from __future__ import annotations

import random

import pytest

from benchmarks.exposure import (
    Cell,
    Measurement,
    check_rows,
    check_text,
    curve_rows,
)

METHODS = {"build_connector_meta": "scheduler", "get_finished": "worker"}


def measured(hidden: float, found: float, rounds: int = 6) -> list:
    """A share `hidden` of a delay is not felt; of what is, a share `found` is found."""
    chance = random.Random(4)
    rows = []
    for _ in range(rounds):
        for mode in ("sync", "async"):
            drift_us = chance.uniform(-300, 300)
            cells = [("build_connector_meta", 0.0), *((m, 1_000.0) for m in METHODS)]
            for method, delay_us in cells:
                felt_us = delay_us * (1 - hidden if mode == "async" else 1)
                tpot_us = 8_000 + drift_us + felt_us + chance.gauss(0, 3)
                parts = {f"{side}.{name}_us": 5.0 for name, side in METHODS.items()}
                if delay_us:
                    parts[f"{METHODS[method]}.{method}_us"] += felt_us * found
                cell = Cell(mode, 1.0, method, delay_us)
                rows.append(Measurement(cell, 20.0, tpot_us, parts))
    return rows


@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
def test_a_right_account_of_what_is_exposed_is_near_what_tpot_rose_by(hidden):
    rows = check_rows(measured(hidden, found=1.0), METHODS)
    assert len(rows) == 4
    for row in rows:
        felt_us = 1_000 * (1 - hidden if row.mode == "async" else 1)
        assert row.tpot_rose_us.value == pytest.approx(felt_us, abs=10)
        assert abs(row.share_of_delay) < 0.02


def test_an_account_that_misses_a_fifth_is_shown_to():
    rows = check_rows(measured(0.0, found=0.8), METHODS)
    for row in rows:
        assert row.share_of_delay == pytest.approx(-0.2, abs=0.02)
        assert row.exposed_less_tpot_us.ci95[1] < -150
    _, note, _ = check_text(rows)
    assert "within 5% of the delay in 0 of 4 cells" in note


def curves() -> list:
    """Three configs of which one adds 300 us."""
    chance = random.Random(2)
    rows = []
    for _ in range(5):
        drift_us = chance.uniform(-300, 300)
        for config, added_us in (("noop", 0), ("walk", 300), ("fixed", 0)):
            tpot_us = 8_000 + drift_us + added_us + chance.gauss(0, 2)
            parts = {"connector_us": 250.0 if added_us else 0.0, "model_us": 7.0}
            rows.append(Measurement(Cell("sync", 0.5, config), 20.0, tpot_us, parts))
    return rows


def test_a_curve_is_what_a_config_adds_to_the_floor_of_the_same_round():
    added = {row.config: row for row in curve_rows(curves())}
    assert added["walk"].tpot_added_us.value == pytest.approx(300, abs=6)
    assert added["fixed"].tpot_added_us.value == pytest.approx(0, abs=6)
    assert added["noop"].tpot_added_us.value == 0
    assert added["walk"].connector_exposed_us == 250
