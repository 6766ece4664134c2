# SPDX-License-Identifier: Apache-2.0
"""A slow machine is not taken for growth, and cannot be made up by a connector."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from microbench.analysis.speed import control_us, too_slow, with_slowness
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


def test_the_slowness_follows_the_machine_and_neither_batch_nor_connector():
    share = np.arange(STEPS) / STEPS
    slower, batch = 1 + share, np.round(2 + 4 * np.abs(np.sin(9 * share))).astype(int)
    found = with_slowness(*machine(slower, batch))["slowness"].to_numpy()
    expected = slower / np.median(slower)
    assert np.median(np.abs(found / expected - 1)) < 0.08


def test_without_samples_the_machine_is_taken_as_it_is():
    steps, _ = machine(np.ones(STEPS), np.full(STEPS, 4))
    assert with_slowness(steps, NO_THREADS)["slowness"].unique().to_list() == [1.0]
    assert control_us(NO_THREADS) is None


def test_a_trial_on_a_much_slower_machine_is_told_from_the_others():
    assert too_slow([80.0, 90.0, 100.0, 240.0, None, 85.0]) == [
        None,
        None,
        None,
        pytest.approx(240 / 90),
        None,
        None,
    ]
    assert too_slow([None, None]) == [None, None]
