# SPDX-License-Identifier: Apache-2.0
"""The cost of a step at the stated level, and its parts, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from kvtax.verdict.levels import Level, split_step, stated_level, thin
from tests.verdict.steps import hold


@pytest.mark.parametrize(
    ("levels", "stated"),
    [
        ([0.0, 0.3, 0.6, 0.92, 1.0], 3),
        ([0.0, 0.5, 1.0, 1.0], 1),
        ([0.0, 0.999], 1),
        # All are full: the last.
        ([1.0, 1.0], 1),
    ],
)
def test_the_stated_level_is_the_highest_below_a_full_cache(levels, stated):
    assert stated_level({"load": {"ladder": {"levels": levels}}}) == stated


def test_a_level_has_decode_only_steps_of_its_own():
    steps = pl.concat(
        [
            hold(level=3, steps=3, cache_blocks=[100, 200, 900]),
            hold(level=3, steps=5, decode_only=False),
            hold(level=2, steps=5),
        ]
    )
    assert Level.of(steps, 3).steps.height == 3
    assert Level.of(steps, 3).cache_blocks == 200
    assert Level.of(steps, 4) is None


def test_quantiles_are_times_that_were_measured():
    us = [float(n) for n in range(1, 101)]
    level = Level.of(hold(level=3, steps=100, schedule_us=us, bind_us=None), 3)
    # 49.5, 89.1 and 98.01 steps are below: the next ones.
    assert level.quantiles("schedule_us") == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert level.quantiles("bind_us") is None


def test_parts_are_means_of_the_middle_half_of_the_steps():
    # Of 8 steps of 1 to 8 ms, the quartiles are the third and the seventh.
    step_us = [1_000.0 * n for n in (8, 7, 6, 5, 4, 3, 2, 1)]
    level = Level.of(
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
        ),
        0,
    )
    assert level.attribution_us() == {
        "schedule_without_build_meta": 450.0,
        "build_meta": 50.0,
        "bind": None,
        "start_load_kv": 10.0,
        "wait_for_save": 20.0,
        "get_finished": 30.0,
        "execute_model_rest": 2_440.0,
        "update": 50.0,
        # 5,000 less 500, 2,500 and 50.
        "other": 1_950.0,
        "step": 5_000.0,
    }


def test_steps_without_a_worker_record_are_in_no_part():
    level = Level.of(
        hold(
            steps=3,
            step_us=[1_000.0, 2_000.0, 9_000.0],
            execute_model_us=[500.0, 1_500.0, None],
        ),
        0,
    )
    assert level.attribution_us()["step"] == 2_000.0


def test_the_parts_add_up_to_the_step():
    names = ("schedule", "build_meta", "step", "update", "execute_model", "bind")
    names = (*names, "start_load_kv", "wait_for_save", "get_finished")
    us = dict(
        zip(names, (50.0, 7.0, 400.0, 30.0, 200.0, 1.0, 2.0, 4.0, 8.0), strict=True)
    )
    parts = split_step({f"{name}_us": value for name, value in us.items()})
    whole = parts.pop("step")
    assert whole == sum(parts.values()) == 400.0
    assert parts["execute_model_rest"] == 185.0
    assert parts["other"] == 120.0
    assert parts["schedule_without_build_meta"] == 43.0


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
