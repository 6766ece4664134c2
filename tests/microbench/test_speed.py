# SPDX-License-Identifier: Apache-2.0
"""A slow machine is not taken for growth, and cannot be made up by a connector."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from microbench.analysis.growth import Reset
from microbench.analysis.machine import metrics_here
from microbench.analysis.speed import Control, read_control, too_slow, with_slowness
from microbench.analysis.threads import NO_THREADS

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
        (0, int(step), 0, 0, 0, SAMPLE_STEPS, name, us * SAMPLE_STEPS, us)
        for name, times in (
            ("Thread-2 (process_output_sockets)", outputs),
            ("burner", burner),
        )
        for step, us in zip(ends, times, strict=True)
    ]
    return steps, pl.DataFrame(rows, schema=NO_THREADS.schema, orient="row")


def control_of(slower: np.ndarray, batch: np.ndarray) -> Control:
    return read_control(*machine(slower, batch))


def test_the_slowness_follows_the_machine_and_neither_batch_nor_connector():
    share = np.arange(STEPS) / STEPS
    slower, batch = 1 + share, np.round(2 + 4 * np.abs(np.sin(9 * share))).astype(int)
    steps, threads = machine(slower, batch)
    found = with_slowness(steps, read_control(steps, threads))["slowness"].to_numpy()
    expected = slower / np.median(slower)
    assert np.median(np.abs(found / expected - 1)) < 0.08


def test_without_samples_the_machine_is_taken_as_it_is():
    steps, _ = machine(np.ones(STEPS), np.full(STEPS, 4))
    assert read_control(steps, NO_THREADS) is None
    assert with_slowness(steps, None)["slowness"].unique().to_list() == [1.0]
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


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_part_is_corrected_as_far_as_it_follows_the_machine(share: float):
    """Found from how its falls scatter; that one config's cost does grow is no hint."""
    rng = np.random.default_rng(7)
    resets = []
    for slope_us in (0.0, 0.0, 60.0):
        steps = pl.concat(
            side(rng, share, repeat, cycle, blocks, slope_us)
            for repeat in range(2)
            for cycle in range(4)
            for blocks in (1_000, 16_000)
        )
        resets.append(Reset(steps.with_row_index("step_id")))
    found = metrics_here(resets, repeats=2)
    assert found["scheduler_cpu"].slowness_share == share
    assert found["schedule"].slowness_share == 0


def side(
    rng: np.random.Generator,
    share: float,
    repeat: int,
    cycle: int,
    blocks: int,
    slope_us: float,
) -> pl.DataFrame:
    """Steps just after a reset, or just before the next, on a machine as slow as chance
    has it."""
    slowness = rng.uniform(0.8, 2.5)
    usual_us = rng.normal(150, 5, 200) + slope_us * blocks / 1_000
    steps = pl.DataFrame({"scheduler_cpu_us": usual_us * slowness**share})
    return steps.with_columns(
        connector_us=pl.lit(None, pl.Float64),
        threads_us=pl.lit(None, pl.Float64),
        slowness=slowness,
        decode_only=True,
        prefills=False,
        batch=8,
        phase=0,
        repeat=repeat,
        cycle=cycle,
        cache_blocks=blocks,
    )
