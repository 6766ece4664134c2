# SPDX-License-Identifier: Apache-2.0
"""From steps to holds: which steps count, and the one number of each hold."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.steps.parts import attributed
from kvtax.steps.trial_steps import NO_CPU
from kvtax.verdict.holds import (
    LONG_US,
    as_holds,
    as_table,
    held_steps,
    hold_table,
    holds_of,
    holds_of_cpu,
    rare_steps,
)
from kvtax.verdict.measured import Level, thin
from kvtax.verdict.metrics import METRICS, PROCESSES, THREADS, Metric
from tests.verdict.conftest import cpu, hold

MEAN = Metric("schedule_us")
LADDER = Ladder([0.0, 1.0], 1, 8, 200, 8, 12.0, many_decoders=32)


def values_of(steps: pl.DataFrame, metric: Metric) -> list[float]:
    held = held_steps(steps, LADDER)
    found = holds_of(held, metric)
    return [] if found is None else found.values.tolist()


def test_steps_are_held_while_all_decoders_run():
    steps = pl.concat(
        hold(steps=1, batch=batch, decoders=decoders, phase=int(phase))
        for batch, decoders, phase in (
            (8, 8, Phase.HOLD),
            (9, 8, Phase.HOLD),
            (7, 8, Phase.HOLD),
            (32, 32, Phase.HOLD),
            (31, 32, Phase.HOLD),
            # An older driver, which named no requests.
            (10, 0, Phase.HOLD),
            (8, 8, Phase.FILL),
            (8, 8, Phase.PLATEAU),
            (8, 8, Phase.GROWTH),
        )
    )
    held = held_steps(steps, LADDER)
    assert held["batch"].to_list() == [8, 9, 32, 10]
    assert held["many"].to_list() == [False, False, True, False]


@pytest.mark.parametrize(
    ("us", "expected"),
    [
        # 0 to 199: the slowest 19 are beyond the step at 90 %.
        ([*map(float, range(200))], 90.0),
        ([*map(float, range(199)), 10_000.0], 90.0),
        # A cost in fewer than one step of ten is cut off whole; in one of eight not.
        ([1.0] * 37 + [101.0] * 3, 1.0),
        ([1.0] * 35 + [101.0] * 5, 13.5),
    ],
)
def test_a_hold_is_the_mean_without_its_slowest_tenth(us, expected):
    steps = hold(steps=len(us), schedule_us=us)
    (value,) = values_of(steps, MEAN)
    assert value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "steps", "values"),
    [
        ("schedule", 10, [100.0]),
        ("schedule", 9, []),
        ("timed", 10, [100.0]),
        ("timed", 9, []),
        ("prefill", 1, [100.0]),
    ],
)
def test_a_hold_with_too_few_of_its_steps_has_no_value(metric, steps, values):
    prefills = metric == "prefill"
    own = hold(steps=steps, decode_only=not prefills, prefills=prefills)
    assert values_of(own, METRICS[metric]) == pytest.approx(values)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("schedule", 1.0),
        ("overhead", 2.0),
        ("step", 3.0),
        # 30 decodes of 2 us and 10 steps with a prompt of 20: without the slowest
        # tenth, as all of the slowest are alike, none is cut off.
        ("timed", 6.5),
        ("timed_many", 200.0),
        ("prefill", 40.0),
    ],
)
def test_every_metric_takes_its_own_column_and_its_own_steps(metric, expected):
    names = ("schedule_us", "overhead_us", "step_us", "connector_us")
    decodes, prompts, many = (
        hold(
            number=number,
            steps=steps,
            decode_only=not prefills,
            prefills=prefills,
            batch=batch,
            decoders=batch,
            **{name: (n + 1.0) * factor for n, name in enumerate(names)},
        )
        for number, steps, prefills, factor, batch in (
            (0, 30, False, 1, 8),
            (0, 10, True, 10, 8),
            (1, 40, False, 100, 32),
        )
    )
    steps = pl.concat([decodes, prompts, many])
    assert values_of(steps, METRICS[metric]) == pytest.approx([expected])


def test_a_step_that_was_not_timed_is_left_out_and_a_metric_that_never_was_is_none():
    steps = hold(schedule_us=[None, *[6.0] * 39])
    assert values_of(steps, MEAN) == [6.0]
    assert values_of(hold(schedule_us=None), MEAN) == []


def test_a_hold_has_its_server_level_cache_time_and_age():
    steps = pl.concat(
        [
            hold(1, 0, 2, at_s=40.0, cache_blocks=3_000, schedule_us=4.0, age_s=3.0),
            hold(0, 1, 0, at_s=20.0, cache_blocks=1_500, schedule_us=2.0),
            hold(0, 0, 1, at_s=10.0, cache_blocks=[1_000] * 20 + [2_000] * 20),
        ]
    )
    found = holds_of(held_steps(steps, LADDER), MEAN)
    assert found.server.tolist() == [0, 0, 1]
    assert found.level.tolist() == [1, 0, 2]
    assert found.x.tolist() == [1.5, 1.5, 3.0]
    # The mean of 40 steps that are 1 ms apart.
    assert found.time_s.tolist() == pytest.approx([10.0195, 20.0195, 40.0195])
    assert found.age_s.tolist() == [0.0, 0.0, 3.0]
    assert found.values.tolist() == [100.0, 2.0, 4.0]


def test_cpu_time_beside_the_steps_is_that_of_threads_or_of_all_processes():
    held = held_steps(pl.concat([hold(number=n) for n in range(3)]), LADDER)
    table = pl.concat(
        [
            cpu(number=0, us=900.0),
            cpu(number=0, us=4.0, of="io"),
            cpu(number=0, us=5.0, of="queue"),
            cpu(number=1, us=800.0),
        ]
    )
    holds = hold_table(held, table)
    threads, processes = (as_holds(holds, name) for name in (THREADS, PROCESSES))
    # A hold without a thread of a connector's has 0 us of them; one that was not read
    # has no value.
    assert threads.values.tolist() == [9.0, 0.0]
    assert processes.values.tolist() == [900.0, 800.0]
    assert holds_of_cpu(held, table.filter(of="io")).values.tolist() == [4.0]
    unread = hold_table(held, table.clear())
    assert as_holds(unread, THREADS) is None and as_holds(unread, PROCESSES) is None


def test_a_table_of_holds_is_the_same_after_it_was_a_files_columns():
    many = hold(number=1, batch=32, decoders=32, overhead_us=300.0, step_us=900.0)
    held = held_steps(pl.concat([hold(overhead_us=1 / 3), many]), LADDER)
    table = hold_table(held, pl.concat([cpu(us=900.0), cpu(number=1, us=90.0)]))
    assert table["many"].to_list() == [0, 1]
    assert table["timed"].to_list() == [0.333, None]
    assert table["timed_many"].to_list() == [None, 300.0]
    assert table["rest"].to_list() == [99.667, 600.0]
    assert as_holds(table, "timed").control.tolist() == [99.667]
    assert as_holds(table, "step").control is None
    # CPU times and long steps are of holds with few decoders.
    assert table[PROCESSES].to_list() == [900.0, None]
    assert table["steps"].to_list() == [40, None]
    again = as_table(table.to_dict(as_series=False))
    for name in ("timed", "timed_many", PROCESSES):
        first, second = as_holds(table, name), as_holds(again, name)
        for before, after in zip(
            vars(first).values(), vars(second).values(), strict=True
        ):
            assert np.array_equal(before, after)
    assert rare_steps(again) == rare_steps(table)


def holds_with_stalls(counts: list[list[int]], **columns) -> pl.DataFrame:
    """Passes over five levels; so many steps of each hold take 6 ms longer."""
    rows = []
    for number, (level, stalls) in enumerate(
        (level, stalls) for row in counts for level, stalls in enumerate(row)
    ):
        us = [100.0] * (40 - stalls) + [6_100.0] * stalls
        times = {"connector_us": us} | columns
        rows.append(hold(0, number, level, cache_blocks=3_000 * level, **times))
    return hold_table(held_steps(pl.concat(rows), LADDER), NO_CPU)


def test_long_steps_are_counted_by_level_and_judged_by_chance():
    rare = rare_steps(holds_with_stalls([[0, 0, 1, 1, 1]] * 6))
    assert rare.longer_by_us == LONG_US
    assert rare.steps == [240] * 5
    assert rare.long == [0, 0, 6, 6, 6]
    # Twelve of thirty places are without: fewer than one deal of 1,000 is so uneven.
    assert rare.chance < 0.001
    even = rare_steps(holds_with_stalls([[1, 0, 1, 0, 1]] * 6))
    assert even.chance > 0.2
    # A burst of one hold says little.
    assert (
        rare_steps(holds_with_stalls([[0, 0, 0, 0, 9], *[[0] * 5] * 5])).chance > 0.05
    )
    none = rare_steps(holds_with_stalls([[0] * 5] * 2))
    assert (none.long, none.chance) == ([0] * 5, 1.0)


def test_without_a_connector_long_steps_are_those_of_the_scheduler():
    us = [100.0] * 39 + [6_100.0]
    held = held_steps(hold(connector_us=None, overhead_us=us), LADDER)
    assert rare_steps(hold_table(held, NO_CPU)).long == [1]
    assert rare_steps(hold_table(held.clear(), NO_CPU)) is None


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
    assert Ladder(levels, 1, 8, 200, 8, 12.0).stated_level == stated


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
    # Of 8 steps, the quartiles are the third and the seventh.
    step_us = [1_000.0 * n for n in (90, 7, 6, 5, 4, 3, 2, 1)]
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
    parts = attributed({f"{name}_us": value for name, value in us.items()})
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
