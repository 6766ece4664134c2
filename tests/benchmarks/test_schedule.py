# SPDX-License-Identifier: Apache-2.0
"""What a connector adds is found in the part of schedule() that it was added to."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.schedule import (
    AGAIN,
    FLOOR,
    LISTENED,
    OWN,
    Process,
    report,
    rows,
)

ROUNDS, STEPS = 12, 60
ADDED_US = {"before": (5.0, 0.0, 0.0), "build_meta": (0.0, 5.0, 0.0)}


def samples(added_us: tuple[float, float, float]) -> dict:
    """Two processes, the second 40 % slower, each drifting from round to round."""
    rng = np.random.default_rng(1)

    def times_us(speed: float, more: tuple[float, float, float]) -> np.ndarray:
        parts = np.array([80.0, 1.0, 10.0]) * speed + np.array(more)
        return parts[:, None] + rng.normal(0, 1.0, (3, STEPS))

    found = {}
    for number, slower in enumerate((1.0, 1.4)):
        speeds = slower * (1 + 0.3 * np.linspace(0, 1, ROUNDS))
        found[Process("mine", number)] = [
            {mode: times_us(speed, (0, 0, 0)) for mode in (FLOOR, AGAIN, LISTENED)}
            | {OWN: times_us(speed, added_us)}
            for speed in speeds
        ]
    return found


@pytest.mark.parametrize("where", list(ADDED_US))
def test_a_cost_is_found_where_it_is_whatever_process_and_round_it_was(where):
    by_part = {row.part: row for row in rows(samples(ADDED_US[where]))}
    more = {part: row.more_us["p50"] for part, row in by_part.items()}
    dear, free = "the rest", "build_connector_meta"
    if where == "build_meta":
        dear, free = free, dear
    for part in ("schedule()", dear):
        low, high = more[part][OWN].ci95
        assert low < 5.0 < high
        assert high - low < 1.5
    assert abs(more[free][OWN].value) < 0.5
    assert all(abs(of[AGAIN].value) < 0.5 for of in more.values())
    assert by_part["schedule()"].own_times_noop["p50"].value > 1.03


def test_the_report_shows_how_much_two_processes_differ():
    made = samples(ADDED_US["before"])
    _, processes = report(rows(made), made)
    p50_us = [
        float(line.split("|")[3])
        for line in processes.splitlines()
        if line.startswith(("| `mine` | 0", "| `mine` | 1"))
    ]
    assert p50_us[1] / p50_us[0] == pytest.approx(1.4, rel=0.05)
