# SPDX-License-Identifier: Apache-2.0
"""From steps to holds: which steps count, and each column of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase, RequestRecord
from kvtax.steps.trial_steps import NO_READINGS
from kvtax.verdict.holds import (
    LONG_US,
    as_table,
    held_steps,
    hold_table,
    metric_holds,
    own_us,
    rare_steps,
    tpot_of_holds,
)
from tests.verdict.conftest import hold, reading

LADDER = Ladder([0.0, 1.0], 1, 8, 200, 8, 12.0, many_decoders=32)
NO_REQUESTS = tpot_of_holds(0, [], 0.0)


def table_of(
    steps: pl.DataFrame,
    readings: pl.DataFrame = NO_READINGS,
    tpot_us: pl.DataFrame = NO_REQUESTS,
) -> pl.DataFrame:
    return hold_table(steps, readings, tpot_us, LADDER)


def value_of(column: str, *steps: pl.DataFrame, **tables: pl.DataFrame) -> Any:
    return table_of(pl.concat(steps), **tables)[column][0]


def test_steps_are_whole_while_all_decoders_run():
    steps = pl.concat(
        hold(steps=1, batch=batch, decoders=decoders, phase=int(phase))
        for batch, decoders, phase in (
            (8, 8, Phase.HOLD),
            (7, 8, Phase.HOLD),
            (32, 32, Phase.HOLD),
            (31, 32, Phase.HOLD),
            # An older driver, which named no requests.
            (10, 0, Phase.HOLD),
            (8, 8, Phase.FILL),
            (8, 8, Phase.GROWTH),
        )
    )
    held = held_steps(steps, LADDER)
    assert held["batch"].to_list() == [8, 7, 32, 31, 10]
    assert held["whole"].to_list() == [True, False, True, False, True]
    assert held["many"].to_list() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("us", "usual", "whole"),
    [
        # A cost in fewer than one step of ten is cut off of `timed`, not of `calls`.
        ([1.0] * 37 + [101.0] * 3, 1.0, 8.5),
        ([1.0] * 35 + [101.0] * 5, 13.5, 13.5),
    ],
)
def test_the_connectors_calls_are_counted_whole(us, usual, whole):
    steps = hold(overhead_us=us, connector_us=us)
    assert value_of("timed", steps) == usual
    assert value_of("calls", steps) == whole


def test_calls_in_steps_with_fewer_requests_count_too():
    ends = hold(steps=40, batch=7, connector_us=50.0, overhead_us=900.0)
    assert value_of("calls", hold(connector_us=10.0), ends) == 30.0
    assert value_of("timed", hold(), ends) == 100.0


def test_every_metric_takes_its_own_column_and_its_own_steps():
    decodes, prompts, many = (
        hold(
            number=number,
            steps=steps,
            decode_only=not prefills,
            prefills=prefills,
            batch=batch,
            decoders=batch,
            schedule_us=1.0 * factor,
            overhead_us=2.0 * factor,
            step_us=3.0 * factor,
            connector_us=4.0 * factor,
        )
        for number, steps, prefills, factor, batch in (
            (0, 30, False, 1, 8),
            (0, 10, True, 10, 8),
            (1, 40, False, 100, 32),
        )
    )
    table = table_of(pl.concat([decodes, prompts, many]))
    few, large = table.to_dicts()
    assert (few["schedule"], few["step"], few["prefill"]) == (1.0, 3.0, 40.0)
    # 30 decodes of 2 us and 10 steps with a prompt of 20.
    assert (few["timed"], few["calls"]) == (6.5, 13.0)
    assert (large["timed_many"], large["calls_many"]) == (200.0, 400.0)
    assert large["timed"] is None and few["timed_many"] is None


@pytest.mark.parametrize(
    ("columns", "own"),
    [
        # Of a step of 900 us, 100 are scheduler and connector, 500 the model's sleep.
        ({"step_us": 900.0, "forward_us": 500.0}, 300.0),
        # A late wake-up is in the sleep as it was measured.
        ({"step_us": [900.0, 9_900.0] * 20, "forward_us": [500.0, 9_500.0] * 20}, 300),
        # A real model: CPU time of the thread.
        ({"step_us": 900.0, "forward_us": None, "thread_cpu_us": 450.0}, 350.0),
        # A call that waits is no work of vLLM's.
        ({"step_us": 8_000.0, "overhead_us": 7_200.0, "forward_us": 500.0}, 300.0),
        ({"step_us": 900.0, "forward_us": None}, None),
    ],
)
def test_own_work_is_the_rest_of_the_step(columns, own):
    assert value_of("own", hold(**columns)) == own


def test_values_are_shares_of_own_work_in_the_same_hold():
    slow = hold(number=1, overhead_us=200.0, step_us=500.0)
    table = table_of(pl.concat([hold(), slow]))
    assert table["timed"].to_list() == [100.0, 200.0]
    assert table["own"].to_list() == [100.0, 200.0]
    assert metric_holds(table, "timed").values.tolist() == [1.0, 1.0]
    assert own_us(table) == 150.0
    # Without own work there is no share.
    unknown = table_of(hold(forward_us=None))
    assert metric_holds(unknown, "timed") is None


def test_a_hold_has_its_server_level_cache_time_and_age():
    steps = pl.concat(
        [
            hold(1, 0, 2, at_s=40.0, cache_blocks=3_000, age_s=3.0),
            hold(0, 1, 0, at_s=20.0, cache_blocks=1_500),
            hold(0, 0, 1, at_s=10.0, cache_blocks=[1_000] * 20 + [2_000] * 20),
        ]
    )
    holds = metric_holds(table_of(steps), "timed")
    assert holds.server.tolist() == [0, 0, 1]
    assert holds.level.tolist() == [1, 0, 2]
    assert holds.x.tolist() == [1.5, 1.5, 3.0]
    # The mean of 40 steps that are 1 ms apart.
    assert holds.time_s.tolist() == pytest.approx([10.0195, 20.0195, 40.0195], abs=1e-3)
    assert holds.age_s.tolist() == [0.0, 0.0, 3.0]


def test_what_the_driver_read_is_cpu_time_waits_and_memory():
    steps = pl.concat([hold(number=n) for n in range(3)])
    readings = pl.concat(
        [
            reading(
                **{"thread io": 4.0, "thread queue": 5.0},
                processes=900.0,
                engine=300.0,
                waited=30.0,
                memory=640.0,
            ),
            reading(number=1, processes=800.0),
        ],
        how="diagonal",
    )
    table = table_of(steps, readings=readings)
    # A hold without a thread of a connector's has 0 us of them; one that was not read
    # has no value.
    assert table["threads"].to_list() == [9.0, 0.0, None]
    assert table["processes"].to_list() == [900.0, 800.0, None]
    assert table["thread io"].to_list() == [4.0, None, None]
    row = table.to_dicts()[0]
    assert (row["engine"], row["waited"], row["memory"]) == (300.0, 30.0, 640.0)
    # Memory is no share of own work.
    assert metric_holds(table, "memory").values.tolist() == [640.0]
    assert metric_holds(table_of(steps), "processes") is None


def test_what_follows_a_hold_is_the_calls_in_its_steps_per_request():
    hits = hold(steps=3, phase=int(Phase.HIT), connector_us=[9.0, 1.0, 2.0], batch=1)
    idle = hold(steps=1, phase=int(Phase.AFTER_IDLE), connector_us=70.0, batch=1)
    table = table_of(pl.concat([hold(), hits, idle, hold(number=1)]))
    assert table["hit"].to_list() == [6.0, None]
    assert table["after_idle"].to_list() == [70.0, None]
    assert table["long_prompt"].to_list() == [None, None]


def request(phase: str, tpot_us: float, status: str = "ok") -> RequestRecord:
    return RequestRecord(
        id=0,
        phase=phase,
        status=status,
        prompt_tokens=16,
        output_tokens=11,
        first_token_ns=0,
        end_ns=round(10e3 * tpot_us),
    )


def test_tpot_is_that_of_the_requests_which_decode_in_the_hold():
    requests = [
        *(request("fill.4.2.8.decoders", us) for us in (2_600.0, 2_700.0, 9_000.0)),
        request("fill.4.2.8.decoders", 1.0, status="failed"),
        request("fill.4.2.8", 1.0),
        request("hold.4.2.8", 1.0),
    ]
    (row,) = tpot_of_holds(1, requests, 2_000.0).to_dicts()
    # The sleep that stands for the GPU is no work.
    assert row == {"repeat": 1, "hold": 4, "level": 2, "tpot": 700.0}


def test_a_table_of_holds_is_the_same_after_it_was_a_files_columns():
    many = hold(number=1, batch=32, decoders=32, overhead_us=300.0, step_us=900.0)
    table = table_of(
        pl.concat([hold(overhead_us=1 / 3), many]), readings=reading(processes=900.0)
    )
    assert table["many"].to_list() == [0, 1]
    assert table["timed"].to_list() == [0.333, None]
    assert table["own"].to_list() == [199.667, 500.0]
    assert table["steps"].to_list() == [40, None]
    again = as_table(table.to_dict(as_series=False), 0.0)
    for name in ("timed", "timed_many", "processes"):
        first, second = metric_holds(table, name), metric_holds(again, name)
        pairs = zip(vars(first).values(), vars(second).values(), strict=True)
        assert all(np.array_equal(before, after) for before, after in pairs)
    assert rare_steps(again) == rare_steps(table)


def test_older_tables_have_the_rest_of_the_step_and_what_the_model_was_to_sleep():
    table = table_of(hold()).rename({"own": "rest"}).with_columns(rest=pl.lit(2_650.0))
    again = as_table(table.to_dict(as_series=False), 2_000.0)
    assert again["own"].to_list() == [650.0]


def holds_with_stalls(counts: list[list[int]]) -> pl.DataFrame:
    """Passes over five levels; so many steps of each hold take 6 ms longer."""
    rows = []
    for number, (level, stalls) in enumerate(
        (level, stalls) for row in counts for level, stalls in enumerate(row)
    ):
        us = [100.0] * (40 - stalls) + [6_100.0] * stalls
        rows.append(hold(0, number, level, cache_blocks=3_000 * level, connector_us=us))
    return table_of(pl.concat(rows))


def test_long_steps_are_counted_by_level_and_judged_by_chance():
    rare = rare_steps(holds_with_stalls([[0, 0, 1, 1, 1]] * 6))
    assert rare.longer_by_us == LONG_US
    assert rare.steps == [240] * 5
    assert rare.long == [0, 0, 6, 6, 6]
    # Twelve of thirty places are without: fewer than one deal of 1,000 is so uneven.
    assert rare.chance < 0.001
    assert rare_steps(holds_with_stalls([[1, 0, 1, 0, 1]] * 6)).chance > 0.2
    # A burst of one hold says little.
    burst = [[0, 0, 0, 0, 9], *[[0] * 5] * 5]
    assert rare_steps(holds_with_stalls(burst)).chance > 0.05


def test_without_a_connector_long_steps_are_those_of_the_scheduler():
    us = [100.0] * 39 + [6_100.0]
    steps = hold(connector_us=None, overhead_us=us)
    assert rare_steps(table_of(steps)).long == [1]
    assert rare_steps(table_of(steps).clear()) is None


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
