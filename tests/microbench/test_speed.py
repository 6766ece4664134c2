# SPDX-License-Identifier: Apache-2.0
"""A machine that slows down is not taken for growth, and growth is not hidden."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from lab.stats.slope import make_cells, slope_us_per_1k_blocks
from microbench.analysis.speed import at_usual_speed

STEPS, FORWARD_US = 4_000, 2_000.0


def slope(growth_us_per_1k: float, slowdown: float) -> float:
    """Slope of the overhead while the machine gets slower by `slowdown` in all."""
    rng = np.random.default_rng(1)
    share = np.arange(STEPS) / STEPS
    blocks = 18_000 * share
    slower = 1 + slowdown * share
    overhead = (100 + growth_us_per_1k * blocks / 1_000) * slower
    runner = 500 * slower * rng.lognormal(0, 0.1, STEPS)
    steps = pl.DataFrame(
        {
            "repeat": 0,
            "batch": 4,
            "cache_blocks": blocks.astype(np.int64),
            "overhead_us": overhead * rng.lognormal(0, 0.1, STEPS),
            "execute_model_us": FORWARD_US + runner + 7,
            "bind_us": 1.0,
            "start_load_kv_us": 2.0,
            "wait_for_save_us": 1.0,
            "get_finished_us": 3.0,
        },
        schema_overrides={"batch": pl.Int16, "repeat": pl.Int16},
    )
    cells = make_cells(at_usual_speed(steps, FORWARD_US), ("overhead_us",))
    return slope_us_per_1k_blocks(cells, "overhead_us").value


def test_a_machine_that_slows_down_by_half_does_not_look_like_growth():
    assert slope(0.0, slowdown=0.5) == pytest.approx(0, abs=0.4)


@pytest.mark.parametrize("slowdown", [0.0, 0.5, -0.3])
def test_growth_is_found_whatever_the_machine_does(slowdown):
    # In units of the usual speed, which is that of the middle of the run.
    usual = 1 + slowdown / 2
    assert slope(10.0, slowdown) == pytest.approx(10 * usual, rel=0.08)


def test_steps_without_worker_records_are_left_as_they_are():
    columns = ("execute_model_us", "bind_us", "start_load_kv_us", "wait_for_save_us")
    steps = pl.DataFrame(
        {"repeat": [0] * 40, "batch": [1] * 40, "overhead_us": [90.0] * 40}
    ).with_columns(
        pl.lit(None, dtype=pl.Float64).alias(name)
        for name in (*columns, "get_finished_us")
    )
    assert at_usual_speed(steps, FORWARD_US)["overhead_us"].to_list() == [90.0] * 40
