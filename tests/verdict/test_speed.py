# SPDX-License-Identifier: Apache-2.0
"""How slow the machine of a trial was, by the thread that packs outputs."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvtax.verdict.speed import Control, read_control, times_usual, too_slow
from tests.verdict.steps import hold, sample


def control(times: float = 1.0, batch: float = 8.0, samples: int = 20) -> Control:
    """A thread that takes 20 us, and 2 more for each request of the batch."""
    spread = np.linspace(-1, 1, samples)
    size = np.full(samples, batch) + spread
    return Control(np.arange(samples), size, times * (20 + 2 * size))


@pytest.mark.parametrize(
    ("times", "expected"),
    [(1.0, None), (1.45, None), (1.55, 1.55), (3.0, 3.0), (0.5, None)],
)
def test_a_trial_on_a_machine_half_as_slow_again_is_set_aside(times, expected):
    found = too_slow([control(), control(), control(), control(times), None])
    *others, slow, without = found
    assert [*others, without] == [None] * 4
    assert slow == (expected and pytest.approx(expected, rel=0.01))


def test_a_larger_batch_is_no_slow_machine():
    found = times_usual([control(), control(), control(batch=24.0), control(2.0)])
    assert found == pytest.approx([1.0, 1.0, 1.0, 2.0], rel=0.01)


def test_usual_is_what_most_trials_take():
    slow = times_usual([control(4.0), control(), control()])
    assert slow == pytest.approx([4.0, 1.0, 1.0], rel=0.01)
    assert times_usual([None, None]) == [None, None]


@pytest.mark.parametrize(
    ("samples", "steps", "known"),
    [(10, 20, True), (9, 20, False), (10, 19, False)],
)
def test_a_control_has_ten_samples_of_twenty_steps(samples, steps, known):
    threads = pl.concat(
        sample(us=30.0 * steps, steps=steps, step_id=(n + 1) * steps - 1)
        for n in range(samples)
    )
    table = hold(steps=samples * steps)
    assert (read_control(table, threads) is not None) == known


def test_a_sample_has_the_steps_up_to_its_own_and_their_mean_batch():
    ends = [(n + 1) * 20 - 1 for n in range(10)]
    threads = pl.concat(
        [sample(us=20.0 * (n + 1), steps=20, step_id=end) for n, end in enumerate(ends)]
        + [sample(us=1.0, steps=20, step_id=19, thread="MainThread")]
    )
    # The first 20 steps have 2 and 4 requests; the last ones belong to the end.
    batch = [2, 4] * 10 + [6] * 160 + [9] * 25
    found = read_control(hold(steps=205, batch=batch), threads)
    assert found.ends.tolist() == ends
    assert found.us.tolist() == [float(n) for n in range(1, 11)]
    assert found.batch.tolist() == [3.0, *[6.0] * 8, 9.0]
