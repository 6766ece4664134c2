# SPDX-License-Identifier: Apache-2.0
"""Growth with |cache| is told from a machine that is slow for a while, or for good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from kvtax.records.requests import Phase
from kvtax.records.run import RunRecord
from kvtax.records.steps import ThreadsHeader
from kvtax.steps.step_table import CONNECTOR_TIMES, StepFile
from kvtax.steps.trial_steps import (
    CLOCKS,
    NO_THREADS,
    read_threads,
    step_table,
    with_threads,
)
from kvtax.verdict.analysis import analyse
from kvtax.verdict.holds import held_steps, holds_of, places
from kvtax.verdict.metrics import Metric
from kvtax.verdict.speed import Control, read_control, too_slow
from kvtax.verdict.trials import LoadedTrial
from tests.harness.made_up import write_lines
from tests.microbench.synthetic import LADDER, PROFILE, Truth, layout, trial_steps

LEVELS, PASSES = len(LADDER["levels"]), LADDER["passes"]


def trial_of(truth: Truth, repeat: int, seed: int, steps: int = 1_600) -> LoadedTrial:
    """A loaded trial without the detour over files."""
    engine, worker = trial_steps(truth, repeat, seed, steps, 16_000)
    phase, cycle, level = np.zeros((3, steps), int)
    for span in layout(steps):
        own = slice(span.first, span.first + span.count)
        phase[own] = Phase.of(span.name)
        if span.level is not None:
            cycle[own] = 1 + int(span.name.split(".")[1])
            level[own] = span.level
    prefills = pl.col("prefill_tokens") > 0
    shaped = engine.select(
        *("step_id", "t_ns", "schedule_us", "step_us", "update_us"),
        pl.Series("phase", phase, pl.UInt8),
        pl.Series("cycle", cycle, pl.UInt8),
        pl.Series("level", level, pl.UInt8),
        pl.col("scheduled").alias("batch"),
        pl.col("cache_size").alias("cache_blocks"),
        (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"),
        (~prefills).alias("decode_only"),
        prefills.alias("prefills"),
        *(pl.lit(None, pl.Float64).alias(name) for name in ("build_meta_us", *CLOCKS)),
    )
    hooks = (pl.lit(None, pl.Float64).alias(name) for name in CONNECTOR_TIMES)
    worker = worker.select("step_id", "execute_model_us", *hooks)
    files = (StepFile(frame, steps, 0) for frame in (shaped, worker))
    table = with_threads(step_table(repeat, *files), NO_THREADS)
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
    document = analyse(RunRecord(profile=PROFILE), trials, None).document
    return document.configs["plain"].verdict


@pytest.mark.slow
def test_a_flat_cost_is_never_called_growing_on_a_noisy_machine():
    rng = np.random.default_rng(0)
    for seed in range(12):
        trials = [trial_of(Truth("plain"), r, 100 * seed + r) for r in range(3)]
        # One neighbour, who slows a random part of each lifetime.
        noisy = []
        for trial in trials:
            start = rng.uniform(0, 0.9)
            stop = start + rng.uniform(0.05, 0.5)
            noisy.append(slowed(trial, start, stop, rng.uniform(1.1, 1.8)))
        assert verdict_of(noisy) != "grows", seed


def test_a_neighbour_that_looks_like_growth_in_one_pass_does_not_convince():
    trial = trial_of(Truth("plain"), 0, 0)
    holds = [span for span in layout(1_600) if span.level is not None]
    # Slow in the two highest levels of one pass, then gone.
    start, stop = (holds[n].first / 1_600 for n in (LEVELS + 3, 2 * LEVELS))
    assert verdict_of([slowed(trial, start, stop, 2.0)]) == "inconclusive"


def test_a_machine_that_slows_down_for_good_drifts_and_does_not_grow():
    trials = [trial_of(Truth("plain", drift=40.0), r, r) for r in range(2)]
    assert verdict_of(trials) == "drifts"


def test_what_rises_with_the_level_is_growth_whatever_drifts_besides():
    trials = [trial_of(Truth("plain", slope=20.0, drift=40.0), r, r) for r in range(2)]
    assert verdict_of(trials) == "grows"


def test_growth_just_above_the_margin_is_found_on_one_server():
    assert verdict_of([trial_of(Truth("plain", slope=4.0), 0, 0)]) == "grows"
    assert verdict_of([trial_of(Truth("plain"), 0, 0)]) == "flat"


def held_of(trial: LoadedTrial, threads: pl.DataFrame = NO_THREADS):
    """The steps of the holds of a trial, and their places."""
    held = held_steps(trial.steps, LADDER["decoders"])
    return held, places(held, threads)


def test_a_hold_counts_while_all_of_its_decoders_run():
    trial = trial_of(Truth("plain"), 0, 0)
    steps = trial.steps.with_columns(
        # The first decoders of each hold end early, and then it is cheap.
        pl.when(pl.col("step_id") % 20 < 5).then(7).otherwise("batch").alias("batch")
    )
    cheap = steps.with_columns(
        pl.when(pl.col("batch") < 8).then(0.0).otherwise("schedule_us")
    )
    held = held_steps(cheap, 8)
    assert held["phase"].unique().to_list() == [Phase.HOLD]
    assert held["batch"].min() == 8
    holds = holds_of(
        held, places(held, NO_THREADS), Metric("schedule_us", "all", "median")
    )
    assert holds.values.min() > 50


def test_the_table_of_holds_has_a_row_for_each_level_of_each_pass():
    trials = [trial_of(Truth("plain"), repeat, repeat) for repeat in range(2)]
    steps = pl.concat([trial.steps for trial in trials])
    held = held_steps(steps, LADDER["decoders"])
    holds = holds_of(
        held, places(held, NO_THREADS), Metric("schedule_us", "decode_only", "median")
    )
    assert len(holds.values) == 2 * PASSES * LEVELS
    assert holds.server.tolist() == [0] * PASSES * LEVELS + [1] * PASSES * LEVELS
    assert holds.level.tolist() == list(range(LEVELS)) * PASSES * 2
    assert holds.x == pytest.approx(
        np.tile(16 * np.array(LADDER["levels"]), PASSES * 2), abs=0.2
    )
    for server in range(2):
        assert (np.diff(holds.time_s[holds.server == server]) > 0).all()
    assert (holds.slowness == 1).all()


def test_a_hold_with_too_few_steps_has_no_value_and_an_unmeasured_time_no_holds():
    held, at = held_of(trial_of(Truth("plain"), 0, 0))
    short = (pl.col("cycle") == 1) & (pl.col("level") == 2)
    few = held.with_columns(
        pl.when(short & (pl.col("step_id") % 10 > 0)).then(None).otherwise("step_us")
        .alias("step_us")
    )  # fmt: skip
    found = holds_of(few, at, Metric("step_us", "all", "mean"))
    assert len(found.values) == PASSES * LEVELS - 1
    assert holds_of(held, at, Metric("connector_us", "all", "mean")) is None


def test_a_mean_leaves_out_the_slowest_hundredth_unless_all_steps_are_asked_for():
    trial = trial_of(Truth("plain"), 0, 0, steps=8_000)
    held, _ = held_of(trial)
    rare = held.with_columns(
        # Once in two hundred steps 20 ms, else 10 us.
        pl.when(pl.int_range(held.height) % 200 == 50).then(20_000.0).otherwise(10.0)
        .alias("connector_us")
    )  # fmt: skip
    at = places(rare, NO_THREADS)
    metric = Metric("connector_us", "all", "mean")
    assert holds_of(rare, at, metric).values == pytest.approx(10.0)
    assert holds_of(rare, at, metric, robust=False).values.mean() == pytest.approx(
        110, rel=0.2
    )


def samples_of(held: pl.DataFrame, us: pl.Expr, **place: int) -> pl.DataFrame:
    """One sample of the control in each hold, `us` per step, at another `place`."""
    return (
        held.group_by("repeat", "phase", "cycle", "level")
        .agg(pl.len().cast(pl.Int64).alias("steps"))
        .with_columns(
            us.alias("us_per_step"),
            thread=pl.lit("Thread-2 (process_output_sockets)"),
            **{name: pl.lit(value, pl.UInt8) for name, value in place.items()},
        )
        .with_columns((pl.col("us_per_step") * pl.col("steps")).alias("us"))
    )


def test_the_slowness_of_a_hold_is_that_of_the_control_in_it_and_nowhere_else():
    held, _ = held_of(trial_of(Truth("plain"), 0, 0))
    slow = pl.when(pl.col("cycle") == 2).then(70.0).otherwise(40.0)
    samples = samples_of(held, slow)
    # While the level was filled, it was another machine; a connector's thread is none.
    filling = samples_of(held, pl.lit(900.0), phase=int(Phase.FILL))
    burner = samples.with_columns(thread=pl.lit("burner"), us=pl.lit(1e9))
    _, at = held_of(
        trial_of(Truth("plain"), 0, 0), pl.concat([samples, filling, burner])
    )
    expected = np.where(at["cycle"].to_numpy() == 2, 70 / 40, 1.0)
    assert at["slowness"].to_numpy() == pytest.approx(expected)


def test_a_hold_is_disturbed_where_the_machine_was_slow_and_not_by_a_connector():
    held, _ = held_of(trial_of(Truth("plain"), 0, 0))
    held = held.with_columns(pl.col("worker_calls_us").fill_null(0))
    twice = pl.when(pl.col("cycle") == 2).then(80.0).otherwise(40.0)

    def disturbance(**more_us: pl.Expr) -> np.ndarray:
        own = held.with_columns(pl.col(name) + us for name, us in more_us.items())
        return places(own, samples_of(held, twice))["disturbance"].to_numpy()

    slow = places(held, NO_THREADS)["cycle"].to_numpy() == 2
    assert disturbance()[slow] == pytest.approx(2, rel=0.05)
    assert disturbance()[~slow].max() < 1.05
    full = pl.when(pl.col("level") == LEVELS - 1).then(1_000.0).otherwise(0.0)
    calls = {"worker_calls_us": full, "execute_model_us": full}
    assert disturbance(**calls) == pytest.approx(disturbance())
    # A rare pause of a whole second is for the mean to see.
    pause = pl.when(pl.int_range(held.height) % 97 == 0).then(1e6).otherwise(0.0)
    assert disturbance(execute_model_us=pause) == pytest.approx(disturbance(), rel=0.1)


def test_usual_is_what_the_control_takes_on_the_same_server():
    trials = [trial_of(Truth("plain"), repeat, repeat) for repeat in range(2)]
    held = held_steps(pl.concat([t.steps for t in trials]), LADDER["decoders"])
    samples = samples_of(held, 40.0 + 60.0 * pl.col("repeat"))
    assert places(held, samples)["slowness"].to_list() == pytest.approx([1.0] * 50)


def test_a_sample_of_the_threads_counts_where_it_lies_within_one_hold(tmp_path: Path):
    steps = pl.DataFrame(
        {
            "repeat": 0,
            "step_id": np.arange(400),
            "phase": int(Phase.HOLD),
            "cycle": 1,
            "level": np.arange(400) // 100,
            "cache_blocks": 16_000,
        },
        schema_overrides={"cycle": pl.UInt8, "level": pl.UInt8},
    )
    # Every 40 steps: those that end at 119 and 319 began in the level before.
    ends = np.arange(-1, 400, 40)
    ends[0] = 0
    lines = pl.DataFrame({"t_ns": ends, "step_id": ends}).with_columns(
        pl.struct(pl.lit(80.0).alias("a thread#1"), pl.lit(40.0).alias("a thread#2"))
        .alias("threads")
    )  # fmt: skip
    write_lines(tmp_path / "threads.jsonl", ThreadsHeader(pid=1), [lines])
    found = read_threads(tmp_path / "threads.jsonl", steps)
    assert found["step_id"].to_list() == [39, 79, 159, 199, 239, 279, 359, 399]
    assert found["level"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found["thread"].unique().to_list() == ["a thread"]
    assert found["us"].unique().to_list() == [120.0]
    per_step = with_threads(steps, found)["threads_us"].drop_nulls()
    assert per_step[1:].to_list() == [3.0] * 7


STEPS, SAMPLE_STEPS = 4_000, 100


def machine(slower: np.ndarray, batch: np.ndarray) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps, and threads of a process whose connector burns more and more CPU."""
    rng = np.random.default_rng(3)
    ends = np.arange(SAMPLE_STEPS - 1, STEPS, SAMPLE_STEPS)
    steps = pl.DataFrame(
        {"repeat": 0, "step_id": np.arange(STEPS), "batch": batch},
        schema_overrides={"batch": pl.Int16},
    )
    outputs = (40 + 10 * batch[ends]) * slower[ends] * rng.lognormal(0, 0.05, len(ends))
    burner = 5.0 * ends
    rows = [
        (0, int(step), 0, 0, 0, 0, 0, SAMPLE_STEPS, name, us * SAMPLE_STEPS, us)
        for name, times in (
            ("Thread-2 (process_output_sockets)", outputs),
            ("burner", burner),
        )
        for step, us in zip(ends, times, strict=True)
    ]
    return steps, pl.DataFrame(rows, schema=NO_THREADS.schema, orient="row")


def control_of(slower: np.ndarray, batch: np.ndarray) -> Control:
    return read_control(*machine(slower, batch))


def test_without_samples_the_machine_is_taken_as_it_is():
    steps, _ = machine(np.ones(STEPS), np.full(STEPS, 4))
    assert read_control(steps, NO_THREADS) is None
    assert too_slow([None, None]) == [None, None]


def test_a_slow_machine_is_set_aside_and_an_expensive_connector_is_not():
    """Its steps are longer, so more requests run at a time, with more output each."""
    rng = np.random.default_rng(5)
    usual = np.ones(STEPS)

    def trial(times: float, running: int) -> Control:
        return control_of(times * usual, rng.integers(running, running + 4, STEPS))

    cheap = [trial(times, 2) for times in (0.9, 1.0, 1.1, 0.95, 1.05)]
    expensive = [trial(times, 12) for times in (0.95, 1.0, 1.05)]
    slow = trial(2.0, 2)
    found = too_slow([*cheap, None, *expensive, slow])
    assert found[:-1] == [None] * 9
    assert found[-1] == pytest.approx(2.0, rel=0.15)
