# SPDX-License-Identifier: Apache-2.0
"""What a cost moves with is found in traffic; what cannot be known is not claimed."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from lab.stats.t_and_f import t_quantile
from look.moves import AXES, RUNS, Slope, moves, used_blocks


def traffic(rng: np.random.Generator, steps: int = 20_000) -> pl.DataFrame:
    """A day in small: load goes up and down, and the cache fills and is reset."""
    moment = np.arange(steps) / steps
    running = np.clip(12 + 8 * np.sin(14 * moment) + rng.normal(0, 2, steps), 1, None)
    used = 40 * running + 600 * np.sin(23 * moment + 1) + 700
    return pl.DataFrame(
        {
            "cache_size": (12_000 * ((3 * moment) % 1)).astype(int),
            "running": running.astype(int),
            "free_blocks": (20_000 - used).astype(int),
            "prefill_tokens": np.where(rng.random(steps) < 0.05, 2_000, 0),
        }
    )


def noise(rng: np.random.Generator, steps: int) -> np.ndarray:
    """us, remembered over some hundred steps, with stalls."""
    shocks = rng.normal(0, 3, steps)
    slow = np.convolve(shocks, np.exp(-np.arange(300) / 100), "same")
    return slow / 5 + rng.exponential(5, steps) + 300 * (rng.random(steps) < 0.001)


def moved(steps: pl.DataFrame) -> dict[str, Slope | str]:
    """What the column `us` moved with."""
    return moves(steps, ["us"])["us"]


@pytest.mark.parametrize(
    ("axis", "column", "per"),
    [("cache", "cache_size", 1_000), ("running", "running", 1)],
)
def test_a_slope_is_found_on_its_axis_and_not_on_the_others(axis, column, per):
    rng = np.random.default_rng(3)
    steps = traffic(rng)
    us = 10 + 4.0 * steps[column] / per + noise(rng, steps.height)
    found = moved(steps.with_columns(us.alias("us")))
    assert found[axis].low < 4.0 < found[axis].high
    assert found[axis].high - found[axis].low < 2.0
    for other in ("cache", "running"):
        if other != axis:
            assert found[other].low < 0 < found[other].high


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(8)
    held = []
    for _ in range(60):
        steps = traffic(rng, 8_000)
        us = 2.0 * steps["cache_size"] / 1_000 + noise(rng, steps.height)
        slope = moved(steps.with_columns(us.alias("us")))["cache"]
        held.append(slope.low < 2.0 < slope.high)
    assert np.mean(held) > 0.85


def test_what_hardly_changed_is_not_known():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(pl.lit(5_000).alias("cache_size"))
    found = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert found["cache"] == "it hardly changed"


def test_two_that_rise_together_are_not_told_apart():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(
        free_blocks=20_000 - pl.col("cache_size"),
    )
    us = 3.0 * steps["cache_size"] / 1_000
    found = moved(steps.with_columns(us.alias("us")))
    assert found["cache"] == found["context"] == "it moved together with the others"
    assert isinstance(found["running"], Slope)


def test_few_steps_say_how_many_are_needed():
    steps = traffic(np.random.default_rng(1), 500)
    found = moved(steps.with_columns(pl.lit(1.0).alias("us")))
    assert found == dict.fromkeys(AXES, "fewer than 2,000 steps")


def test_many_times_at_once_are_found_as_each_by_itself():
    rng = np.random.default_rng(5)
    steps = traffic(rng).with_columns(
        a=pl.Series(noise(rng, 20_000)).cast(pl.Float32),
        b=3.0 * pl.col("running"),
        c=pl.lit(0.0),
    )
    together = moves(steps, ["a", "b", "c"])
    assert list(together) == ["a", "b", "c"]
    for time, by_axis in together.items():
        alone = moves(steps, [time])[time]
        assert list(by_axis) == list(alone) == list(AXES)
        for name, slope in by_axis.items():
            assert vars(slope) == pytest.approx(vars(alone[name]), abs=1e-9)
    assert together["b"]["running"].value == pytest.approx(3)
    assert together["c"]["cache"] == Slope(0, 0, 0)


def test_an_axis_that_is_missing_from_some_steps_is_not_used():
    rng = np.random.default_rng(1)
    steps = traffic(rng).with_columns(
        cache_size=pl.when(pl.int_range(pl.len()) > 999).then("cache_size"),
        us=2.0 * pl.col("running"),
    )
    found = moved(steps)
    assert found["cache"] == "not recorded"
    assert found["running"].value == pytest.approx(2)


@pytest.mark.parametrize("steps", [2_000, 2_049, 7_777])
def test_slopes_are_least_squares_and_the_interval_a_jackknife_over_runs(steps):
    rng = np.random.default_rng(steps)
    table = traffic(rng, steps).with_columns(us=pl.Series(noise(rng, steps)))
    number = (pl.int_range(pl.len()) // 50).alias("block")
    blocks = used_blocks(table).group_by(number).mean().sort("block")
    columns = [blocks[axis.column] / axis.per for axis in AXES.values()]
    design = np.column_stack([np.ones(blocks.height), *columns])
    us = blocks["us"].to_numpy()
    run = np.arange(blocks.height) * RUNS // blocks.height

    def fit(rows):
        return np.linalg.lstsq(design[rows], us[rows], rcond=None)[0][1:]

    without = np.stack([fit(run != one) for one in range(RUNS)])
    reach = t_quantile(0.975, RUNS - 1) * np.sqrt((RUNS - 1) * without.var(axis=0))
    found = moved(table)
    assert all(isinstance(slope, Slope) for slope in found.values())
    for slope, value, far in zip(found.values(), fit(run >= 0), reach, strict=True):
        assert slope.value == pytest.approx(value, rel=1e-6)
        assert slope.high - slope.low == pytest.approx(2 * far, rel=1e-6)
