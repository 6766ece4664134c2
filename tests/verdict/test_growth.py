# SPDX-License-Identifier: Apache-2.0
"""Growth with |cache| is told from a machine that is slow for a while, or for good."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvtax.records.requests import PhaseStart
from kvtax.records.run import RunRecord
from kvtax.steps.trial_steps import STEP_TIMES, trial_steps
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import LoadedTrial
from tests.harness.made_up import FIRST_NS, STEP_NS
from tests.microbench.synthetic import LADDER, PROFILE, Truth, layout
from tests.microbench.synthetic import trial_steps as made_up_steps

LEVELS = len(LADDER.levels)


def trial_of(truth: Truth, repeat: int, seed: int, steps: int = 1_600) -> LoadedTrial:
    """A loaded trial without the detour over files."""
    engine, worker = made_up_steps(truth, repeat, seed, steps, 16_000)
    recorded = engine.join(worker.drop("t_ns"), on="step_id").with_columns(
        pl.lit(None, pl.Float64).alias(time)
        for time in (*STEP_TIMES, "yardstick_us")
        if time not in (*engine.columns, *worker.columns)
    )
    phases = []
    for span in layout(steps):
        start_ns = FIRST_NS + span.first * STEP_NS
        reset_ns = start_ns if span.reset else None
        phases.append(PhaseStart(span.name, start_ns, reset_ns))
    return LoadedTrial(
        truth.name, repeat, None, None, trial_steps(repeat, recorded, phases)
    )


def slowed(trial: LoadedTrial, start: float, stop: float, factor: float) -> LoadedTrial:
    """The trial on a machine that is `factor` slower for a part of the time."""
    assert trial.steps is not None
    count = trial.steps.height
    place = pl.int_range(count) / count
    times = ("schedule_us", "overhead_us", "step_us", "scheduler_cpu_us")
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
    # Slow in the highest level of one pass, then gone.
    full = [span for span in holds if span.level == LEVELS - 1][1]
    start, stop = (step / 1_600 for step in (full.first, full.first + full.count))
    assert verdict_of([slowed(trial, start, stop, 2.0)]) != "grows"


def test_a_machine_that_slows_down_for_good_drifts_and_does_not_grow():
    trials = [trial_of(Truth("plain", drift=40.0), r, r) for r in range(2)]
    assert verdict_of(trials) == "drifts"


def test_what_rises_with_the_level_is_growth_whatever_drifts_besides():
    trials = [trial_of(Truth("plain", slope=20.0, drift=40.0), r, r) for r in range(2)]
    assert verdict_of(trials) == "grows"


def test_growth_just_above_the_margin_is_found_on_one_server():
    assert verdict_of([trial_of(Truth("plain", slope=4.0), 0, 0)]) == "grows"
    assert verdict_of([trial_of(Truth("plain"), 0, 0)]) == "flat"
