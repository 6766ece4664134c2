# SPDX-License-Identifier: Apache-2.0
"""The mean's slope sees what few steps pay, and is not taken in by stalls."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from lab.stats.mean_slope import mean_slopes
from lab.stats.processes import Repeats, Spread, over_processes
from lab.stats.slope import make_cells, slopes_of_repeats
from tests.microbench.synthetic import ar1

TIME = "schedule_us"
STEPS, REPEATS = 3_000, 2
CACHE = np.linspace(0, 16_000, STEPS)


def grown(rng: np.random.Generator, us_per_1k: float, paid: np.ndarray) -> np.ndarray:
    """Steps whose batch, 5 us each, grows with |cache|; those `paid` grow more."""
    batch = np.clip(np.round(2 + CACHE / 2_500 + rng.normal(0, 1.2, STEPS)), 1, 10)
    us = 40 + 5 * batch + ar1(rng, STEPS, 0.9, 4) + rng.exponential(6, STEPS)
    return np.column_stack([batch, us + us_per_1k * CACHE / 1_000 * paid])


def frame(rng: np.random.Generator, us_per_1k: float, every: int = 1) -> pl.DataFrame:
    """Two repeats; every so many steps pay `us_per_1k`."""
    paid = np.arange(STEPS) % every == 0
    runs = np.concatenate([grown(rng, us_per_1k, paid) for _ in range(REPEATS)])
    return pl.DataFrame(
        {
            "repeat": np.repeat(np.arange(REPEATS), STEPS),
            "batch": runs[:, 0].astype(int),
            "cache_blocks": np.tile(CACHE, REPEATS),
            TIME: runs[:, 1],
        }
    )


def stalled(rng: np.random.Generator, steps: pl.DataFrame) -> pl.DataFrame:
    """1 % of the steps, in bursts of 5, take 5 to 20 ms more."""
    starts = np.flatnonzero(rng.random(steps.height) < 0.01 / 5)
    hit = (starts[:, None] + np.arange(5)).clip(0, steps.height - 1).ravel()
    us = steps[TIME].to_numpy().copy()
    us[np.unique(hit)] += rng.uniform(5_000, 20_000, len(np.unique(hit)))
    return steps.with_columns(pl.Series(TIME, us))


def interval(values: np.ndarray, variances: np.ndarray) -> tuple[float, float]:
    """95 %, where processes are known not to differ."""
    alike = Spread(between=0.0, error=1e-9, df=18)
    return over_processes(Repeats(values, variances, 1.0), alike, 1).ci95


def test_growth_in_every_third_step_is_seen_by_the_mean_and_missed_by_the_median():
    steps = frame(np.random.default_rng(1), 60.0, every=3)
    values, variances = mean_slopes(steps, TIME)
    assert values.mean() == pytest.approx(20, abs=3)
    assert interval(values, variances)[0] > 10
    medians, _ = slopes_of_repeats(make_cells(steps, (TIME,)), TIME)
    assert np.abs(medians).max() < 2


def test_growth_in_one_of_50_steps_is_no_stall():
    steps = stalled(rng := np.random.default_rng(2), frame(rng, 1_000.0, every=50))
    values, variances = mean_slopes(steps, TIME)
    assert values.mean() == pytest.approx(20, abs=8)
    assert interval(values, variances)[0] > 2


def test_stalls_in_bursts_leave_a_flat_config_flat_and_its_interval_honest():
    runs, held, widths = 60, 0, []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        low, high = interval(*mean_slopes(stalled(rng, frame(rng, 0.0)), TIME))
        held += low <= 0 <= high
        widths.append(high - low)
    assert held / runs >= 0.9
    # Without weights on blocks it is 42.
    assert np.median(widths) < 0.6


@pytest.mark.parametrize("growth", [5.0, 85.6])
def test_a_growing_batch_does_not_tilt_the_slope(growth: float):
    steps = frame(np.random.default_rng(3), growth)
    values, variances = mean_slopes(steps, TIME)
    assert values == pytest.approx(growth, abs=0.4)
    medians, spread = slopes_of_repeats(make_cells(steps, (TIME,)), TIME)
    assert medians == pytest.approx(growth, abs=0.4)
    assert variances == pytest.approx(spread, rel=1.5)


def test_each_combination_of_what_is_held_has_an_offset_of_its_own():
    """Two cycles of growth in one server, the second on a slower machine."""
    steps = frame(np.random.default_rng(4), 3.0).with_columns(
        pl.lit(0).alias("repeat"), pl.col("repeat").alias("cycle")
    )
    upper = (pl.col("cycle") == 0) | (pl.col("cache_blocks") > 8_000)
    slower = steps.filter(upper).with_columns(pl.col(TIME) + 20 * pl.col("cycle"))
    values, _ = mean_slopes(slower, TIME, held=("batch", "cycle"))
    assert values == pytest.approx(3.0, abs=0.3)
    assert mean_slopes(slower, TIME)[0] > 3.6


def test_a_rare_cost_is_found_beside_a_batch_that_grows():
    """A request ends in every 25th step, which takes 500 us more per 1,000 blocks; and
    each request takes 30 us. To hold the batch leaves few steps in which one ends."""
    rng = np.random.default_rng(6)
    count = 6_000
    blocks = np.arange(count) * 16_000 // count
    batch = 4 + (blocks > 8_000) + rng.integers(0, 2, count)
    ends = np.where(np.arange(count) % 25 == 0, 0.5 * blocks, 0)
    us = 30 * batch + ends + rng.exponential(5, count)
    steps = pl.DataFrame(
        {"repeat": 0, "cache_blocks": blocks, "batch": batch, TIME: us}
    )
    told = {"held": (), "block_steps": 200}
    (beside,), (variance,) = mean_slopes(steps, TIME, **told, beside=("batch",))
    assert beside == pytest.approx(20, abs=1) and variance < 1
    (alone,), _ = mean_slopes(steps, TIME, **told)
    assert alone > 21.5


def test_steps_without_a_time_do_not_count():
    steps = frame(np.random.default_rng(5), 4.0)
    gaps = pl.int_range(pl.len()) % 7 == 0
    holed = steps.with_columns(pl.when(gaps).then(None).otherwise(TIME).alias(TIME))
    assert mean_slopes(holed, TIME)[0] == pytest.approx(4.0, abs=0.4)


def test_too_few_steps_or_a_constant_cache_give_no_slope():
    steps = frame(np.random.default_rng(6), 1.0)
    still = steps.with_columns(pl.lit(500.0).alias("cache_blocks"))
    for none in (steps.head(400), still, steps.clear()):
        assert mean_slopes(none, TIME) is None
    for none in (steps.head(60), still, steps.clear()):
        assert slopes_of_repeats(make_cells(none, (TIME,)), TIME) is None
