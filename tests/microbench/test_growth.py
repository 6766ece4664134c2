# SPDX-License-Identifier: Apache-2.0
"""Growth with |cache| is told from a machine that is slow for a while, or for good."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from synthetic import Truth, trial_steps

from lab.records.joined_steps import CONNECTOR_TIMES
from lab.records.phases import Phase
from lab.records.run import RunRecord
from lab.records.step_table import StepFile
from microbench.analysis.analysis import analyse
from microbench.analysis.growth import Reset, slope_by_repeat
from microbench.analysis.levels import Window
from microbench.analysis.metrics import METRICS
from microbench.analysis.speed import with_slowness
from microbench.analysis.steps import CLOCKS, step_table
from microbench.analysis.threads import NO_THREADS, with_threads
from microbench.analysis.trials import LoadedTrial


def trial_of(truth: Truth, repeat: int, seed: int, steps: int = 1_600) -> LoadedTrial:
    """A loaded trial without the detour over files."""
    engine, worker = trial_steps(truth, repeat, seed, steps, 16_000)
    count = engine.height
    phase = np.searchsorted([0.6, 0.85], np.arange(count) / count, side="right")
    prefills = pl.col("prefill_tokens") > 0
    shaped = engine.select(
        *("step_id", "t_ns", "schedule_us", "step_us", "update_us"),
        pl.Series("phase", phase),
        (pl.Series("phase", phase) == Phase.AFTER_RESET).cast(pl.UInt8).alias("cycle"),
        pl.col("scheduled").alias("batch"),
        pl.col("cache_size").alias("cache_blocks"),
        (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"),
        (~prefills).alias("decode_only"),
        prefills.alias("prefills"),
        *(pl.lit(None, pl.Float64).alias(name) for name in ("build_meta_us", *CLOCKS)),
    )
    hooks = (pl.lit(None, pl.Float64).alias(name) for name in CONNECTOR_TIMES)
    worker = worker.select("step_id", "execute_model_us", *hooks)
    files = (StepFile(frame, count, 0) for frame in (shaped, worker))
    table = with_threads(step_table(repeat, *files), NO_THREADS)
    table = with_slowness(table, None)
    return LoadedTrial(truth.name, repeat, None, None, table)


def slowed(trial: LoadedTrial, start: float, stop: float, factor: float) -> LoadedTrial:
    """The trial on a machine that is `factor` slower for a part of the time."""
    assert trial.steps is not None
    count = trial.steps.height
    place = pl.int_range(count) / count
    times = ("schedule_us", "overhead_us", "step_us")
    steps = trial.steps.with_columns(
        pl.when(place.is_between(start, stop)).then(pl.col(t) * factor).otherwise(t)
        for t in times
    )
    return LoadedTrial(trial.config, trial.repeat, None, None, steps)


def verdict_of(trials: list[LoadedTrial]) -> str:
    document = analyse(RunRecord(), trials, None).document
    return document.configs["plain"].verdict


@pytest.mark.slow
def test_a_flat_cost_is_never_called_growing_on_a_noisy_machine():
    rng = np.random.default_rng(0)
    for seed in range(8):
        trials = [trial_of(Truth("plain"), r, 100 * seed + r) for r in range(3)]
        # One neighbour, who slows a random part of each lifetime.
        noisy = []
        for trial in trials:
            start = rng.uniform(0, 0.9)
            stop = start + rng.uniform(0.05, 0.5)
            noisy.append(slowed(trial, start, stop, rng.uniform(1.1, 1.8)))
        assert verdict_of(noisy) != "grows", seed


def test_a_neighbour_that_looks_like_growth_in_one_repeat_does_not_convince():
    trials = [trial_of(Truth("plain"), repeat, repeat) for repeat in range(3)]
    # Slow from the middle of the growth until the reset, then gone.
    trials[1] = slowed(trials[1], 0.3, 0.85, 2.0)
    assert verdict_of(trials) != "grows"


def test_a_machine_that_slows_down_for_good_drifts_and_does_not_grow():
    trials = [
        trial_of(Truth("plain", drift=10.0), repeat, repeat) for repeat in range(2)
    ]
    assert verdict_of(trials) == "drifts"


def test_what_falls_at_the_reset_is_growth_whatever_drifts_besides():
    truth = Truth("plain", slope=20.0, drift=30.0)
    trials = [trial_of(truth, repeat, repeat) for repeat in range(5)]
    assert verdict_of(trials) == "grows"


def test_steps_after_the_reset_do_not_count_towards_a_level():
    steps = pl.DataFrame({"cache_blocks": [100, 100, 90, 101], "phase": [0, 2, 1, 1]})
    kept = Window(100, {}).select(steps)
    assert kept.rows() == [(100, 0), (101, 1)]


def test_growth_just_above_the_margin_is_still_found():
    trials = [
        trial_of(Truth("plain", slope=4.0), repeat, repeat) for repeat in range(2)
    ]
    assert verdict_of(trials) == "grows"


def test_a_cost_of_rare_steps_weighs_as_often_as_they_come():
    """Each step with prefill has another batch size, and so is the only one of it."""
    rng = np.random.default_rng(0)
    sides = []
    for cycle, cache_blocks, count in ((0, 16_000, 2_400), (1, 1_000, 1_200)):
        prefills = np.arange(count) % 60 == 0
        prompt_us = np.where(prefills, 60 * 20 * cache_blocks / 1_000, 0)
        side = pl.DataFrame({"prefills": prefills}).with_columns(
            cycle=cycle,
            cache_blocks=cache_blocks,
            batch=np.where(prefills, 40 + np.arange(count) // 60, 20),
            connector_us=rng.exponential(5, count) + prompt_us,
        )
        sides.append(side)
    steps = pl.concat(sides).with_columns(repeat=0, phase=0, slowness=1.0)
    steps = steps.with_row_index("step_id")
    fall = Reset(steps).fall(METRICS["connector"], seed=0)
    assert 18 < fall.per_1k_blocks.values[0] < 22


def test_what_drifts_from_one_growth_to_the_next_does_not_blur_the_slope():
    """10 us per 1,000 blocks, and 500 us more in the second growth."""
    rng = np.random.default_rng(0)
    count = 2_000
    growths = [
        pl.DataFrame(
            {
                "cache_blocks": np.arange(count) * 16_000 // count,
                "batch": rng.integers(4, 8, count),
                "us": rng.exponential(5, count) + 500 * cycle,
            }
        ).with_columns(pl.col("us") + 0.01 * pl.col("cache_blocks"), cycle=cycle)
        for cycle in range(2)
    ]
    steps = pl.concat(growths).with_columns(
        connector_us="us",
        scheduler_cpu_us="us",
        prefills=False,
        decode_only=True,
        repeat=0,
        slowness=1.0,
    )
    for name in ("connector", "scheduler_cpu"):
        found = slope_by_repeat(steps, None, METRICS[name], seed=0)
        assert found.values[0] == pytest.approx(10, abs=0.2)
        assert found.variances[0] < 0.02
