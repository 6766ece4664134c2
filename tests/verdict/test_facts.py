# SPDX-License-Identifier: Apache-2.0
"""What is measured of a config without a comparison."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvtax.records.requests import Phase
from kvtax.records.run import MachineLoad, TrialRecord
from kvtax.steps.parts import attributed
from kvtax.verdict.facts import (
    attribution_us,
    growth_curve,
    growth_slope,
    long_calls,
    measured,
    thin,
)
from kvtax.verdict.trials import LoadedTrial
from tests.microbench.synthetic import LADDER
from tests.verdict.conftest import hold


def growing(slope_us: float, steps: int = 900) -> pl.DataFrame:
    """Make steps of growth in which the batch grows with |cache|, 5 us a request."""
    rng = np.random.default_rng(3)
    blocks = np.linspace(0, 16_000, steps)
    batch = np.clip(np.round(2 + blocks / 2_500 + rng.normal(0, 1.2, steps)), 1, 10)
    us = 40 + 5 * batch + slope_us * blocks / 1_000 + rng.exponential(3, steps)
    # A core was stolen in some of them.
    us = np.where(rng.random(steps) < 0.03, 20 * us, us)
    return hold(
        steps=steps,
        phase=int(Phase.GROWTH),
        cache_blocks=blocks.astype(int).tolist(),
        batch=batch.astype(int).tolist(),
        schedule_us=us.tolist(),
    )


@pytest.mark.parametrize("slope_us", [0.0, 4.0, 85.6])
def test_the_slope_in_growth_knows_no_batch_and_no_stolen_core(slope_us):
    slope = growth_slope(growing(slope_us))
    assert slope.value == pytest.approx(slope_us, abs=0.5)
    assert slope.ci95 is None
    assert growth_slope(growing(slope_us).clear()) is None


def test_the_curve_in_growth_is_binned_by_cache():
    curve = growth_curve(growing(10.0))
    assert len(curve.cache_blocks) == len(curve.p50_us) == 30
    assert all(np.diff(curve.cache_blocks) > 0)
    assert curve.p50_us[-1] - curve.p50_us[0] > 100
    bands = zip(curve.p25_us, curve.p50_us, curve.p75_us, strict=True)
    assert all(low <= middle <= high for low, middle, high in bands)
    assert growth_curve(hold()) is None


@pytest.mark.parametrize(
    ("call_us", "cpu_us", "count"),
    [
        (12_100.0, 12_500.0, 1),
        # Less than 10 ms over the usual.
        (10_050.0, 12_500.0, 0),
        # A stall of the machine takes no CPU time of the thread.
        (50_000.0, 900.0, 0),
        # Not known whether it does.
        (50_000.0, None, 0),
    ],
)
def test_a_long_call_takes_ten_milliseconds_and_cpu_time(call_us, cpu_us, count):
    calls = hold(
        steps=40,
        phase=int(Phase.FILL),
        connector_us=[100.0] * 39 + [call_us],
        schedule_cpu_us=[None] * 38 + [80.0, 80.0],
        thread_cpu_us=[None] * 38 + [700.0, cpu_us],
    )
    calls_found = long_calls(calls)
    assert (calls_found.count, calls_found.steps) == (count, 40)
    if count:
        assert calls_found.longest_ms == 12.0
        assert calls_found.us_per_step == 300.0


@pytest.mark.parametrize(("cpu_us", "count"), [(15_000.0, 1), (7_500.0, 0)])
def test_cpu_time_of_a_long_step_is_without_that_of_the_steps_before(cpu_us, count):
    """The clock was read after the first step; seven took 200 us beside their sleep."""
    calls = hold(
        steps=9,
        connector_us=[100.0] * 8 + [13_100.0],
        schedule_cpu_us=[80.0] + [None] * 8,
        thread_cpu_us=[700.0] + [None] * 7 + [cpu_us],
    )
    assert long_calls(calls).count == count


def test_long_calls_are_unknown_without_calls_or_without_cpu_times():
    assert long_calls(hold(connector_us=None, thread_cpu_us=700.0)) is None
    assert long_calls(hold()) is None


@pytest.mark.parametrize(("steal_share", "count"), [(0.0, 2), (0.1, None)])
def test_calls_are_not_long_where_the_hypervisor_ran_others(steal_share, count):
    slow = hold(connector_us=[100.0] * 38 + [12_100.0] * 2, thread_cpu_us=20_000.0)
    load = MachineLoad(2, 10.0, steal_share, 0.0)
    record = TrialRecord(
        config="mine", repeat=0, status="ok", num_blocks=9, block_size=16, machine=load
    )
    trial = LoadedTrial("mine", 0, None, record, steps=slow)
    calls = measured([trial], slow, LADDER).long_calls
    assert (calls and calls.count) == count


def test_parts_are_means_of_the_middle_half_of_the_steps():
    # Of 8 steps, the quartiles are the second and the sixth.
    step_us = [1_000.0 * n for n in (90, 7, 6, 5, 4, 3, 2, 1)]
    parts = attribution_us(
        hold(
            steps=8,
            step_us=step_us,
            schedule_us=[0.1 * us for us in step_us],
            build_meta_us=[0.01 * us for us in step_us],
            execute_model_us=[0.5 * us for us in step_us],
            update_us=50.0,
            bind_us=None,
            start_load_kv_us=10.0,
            wait_for_save_us=20.0,
            get_finished_us=30.0,
        )
    )
    # The mean of 2 to 6 ms is 4.
    assert parts == {
        "schedule_without_build_meta": 360.0,
        "build_meta": 40.0,
        "bind": None,
        "start_load_kv": 10.0,
        "wait_for_save": 20.0,
        "get_finished": 30.0,
        "execute_model_rest": 1_940.0,
        "update": 50.0,
        # 4,000 less 400, 2,000 and 50.
        "other": 1_550.0,
        "step": 4_000.0,
    }


def test_steps_without_a_worker_record_are_in_no_part():
    steps = hold(
        steps=3,
        step_us=[1_000.0, 2_000.0, 9_000.0],
        execute_model_us=[500.0, 1_500.0, None],
    )
    assert attribution_us(steps)["step"] == 1_500.0


def test_the_parts_add_up_to_the_step():
    names = ("schedule", "build_meta", "step", "update", "execute_model", "bind")
    names = (*names, "start_load_kv", "wait_for_save", "get_finished")
    us = dict(
        zip(names, (50.0, 7.0, 400.0, 30.0, 200.0, 1.0, 2.0, 4.0, 8.0), strict=True)
    )
    parts = attributed({f"{name}_us": value for name, value in us.items()})
    whole = parts.pop("step")
    assert whole == sum(parts.values()) == 400.0
    assert parts["execute_model_rest"] == 185.0
    assert parts["other"] == 120.0


@pytest.mark.parametrize(
    ("steps", "most", "left"),
    [
        (10, 10, list(range(10))),
        (11, 10, [0, 2, 4, 6, 8, 10]),
        (7, 3, [0, 3, 6]),
        (0, 3, []),
    ],
)
def test_every_kth_step_is_kept(steps, most, left):
    table = pl.DataFrame({"n": list(range(steps))})
    assert thin(table, most)["n"].to_list() == left
