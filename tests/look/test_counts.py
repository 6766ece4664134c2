# SPDX-License-Identifier: Apache-2.0
"""What hosts count and add up is what one look at all their steps would say."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.records.steps import EngineHeader
from look.cost import cost
from look.cost import quantiles as exact_quantiles
from look.counts import ALPHA, NOTHING, counts_of, means, merged, quantiles, slope
from look.instances import COUNTS, Instance

METHOD = "scheduler.build_connector_meta_us"
SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)
TIMES = ("step_us", "model_us", "scheduler_us", "connector_us", "other_us", METHOD)
# From nothing to an hour; what is over may be less than nothing.
us = st.one_of(
    st.just(0.0),
    st.floats(2**-13, 3.6e9, width=32),
    st.floats(-1e6, -(2**-13), width=32),
)
count = st.one_of(st.none(), st.integers(0, 200_000))
step = st.tuples(us, us, count, st.one_of(st.none(), st.integers(0, 2_000)))


def instance(steps: pl.DataFrame) -> Instance:
    nothing = [name for name in COUNTS if name not in steps.columns]
    calls = METHOD.removesuffix("_us") + "_calls"
    steps = steps.with_columns(
        pl.col("step_us", "connector_us").cast(pl.Float32),
        pl.col("cache_size", "running").cast(pl.Int32),
        *(pl.lit(0, pl.Int32).alias(name) for name in nothing),
        *(pl.lit(0, pl.Float32).alias(f"{name}_us") for name in ("model", "other")),
        pl.lit(1.5, pl.Float32).alias("scheduler_us"),
        pl.col("connector_us").cast(pl.Float32).alias(METHOD),
        (pl.col("connector_us") > 0).cast(pl.Int32).alias(calls),
        (pl.int_range(pl.len()) * 1_000).alias("t_ns"),
        (pl.int_range(pl.len()) * 1_000 + 900).alias("end_ns"),
    )
    return Instance("made-up", EngineHeader(), steps)


def table(rows: list[tuple]) -> pl.DataFrame:
    columns = ("step_us", "connector_us", "cache_size", "running")
    return pl.DataFrame(rows, dict.fromkeys(columns, pl.Float64), orient="row")


def counted(rows: list[tuple]) -> pl.DataFrame:
    return counts_of(instance(table(rows)))


def near(found: float, exact: float) -> bool:
    """Within the stated error; times are counted in ns."""
    return abs(found - exact) <= max(ALPHA * abs(exact) * (1 + 1e-6), 1e-3) + 5e-4


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(step, max_size=30), st.lists(step, max_size=30))
def test_to_count_two_parts_and_add_is_to_count_all(one, other):
    assert merged([counted(one), counted(other)]).equals(counted(one + other))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(step, max_size=20), min_size=3, max_size=3))
def test_the_order_in_which_hosts_are_added_does_not_matter(parts):
    a, b, c = (counted(part) for part in parts)
    assert merged([a, b]).equals(merged([b, a]))
    assert merged([merged([a, b]), c]).equals(merged([a, merged([b, c])]))
    assert merged([a, NOTHING]).equals(merged([a]))
    assert merged([]).equals(NOTHING)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(step, min_size=1, max_size=60))
def test_every_quantile_of_every_time_is_within_the_stated_error(rows):
    steps = instance(table(rows)).steps
    counts = counted(rows)
    for time in TIMES:
        exact = exact_quantiles(steps[time], SHARES)
        found = quantiles(counts.filter(pl.col("time") == time), SHARES)
        for one, other in zip(found, exact, strict=True):
            assert near(one, other), (time, exact, found)


def server(seed: int, rows: int = 20_000) -> pl.DataFrame:
    """Steps whose connector takes 3 us more per 1,000 blocks, and stalls at times."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 17_500, rows)
    running = rng.integers(1, 40, rows)
    connector = 5 + 3e-3 * blocks + 0.5 * running + rng.exponential(4, rows)
    connector += 5_000 * (rng.random(rows) < 0.002)
    return pl.DataFrame(
        {
            "step_us": 300 + 2 * running + connector,
            "connector_us": connector,
            "cache_size": blocks,
            "running": running,
        }
    )


def test_hosts_say_together_what_a_look_at_all_their_steps_says():
    parts = [server(seed) for seed in range(3)]
    whole = cost(instance(pl.concat(parts)))
    counts = merged(counts_of(instance(part)) for part in parts)
    for part in (whole.step, *whole.parts, *whole.methods):
        own = counts.filter(pl.col("time") == part.column)
        assert own["steps"].sum() == whole.steps
        mean_us = own["sum_ns"].sum() / whole.steps / 1e3
        assert mean_us == pytest.approx(part.mean_us, rel=1e-6, abs=1e-3)
        assert near(own["most_ns"].max() / 1e3, part.most_us)
        for found, exact in zip(
            quantiles(own, (0.5, 0.99)), (part.p50_us, part.p99_us), strict=True
        ):
            assert near(found, exact)
        if part.calls_per_step is not None:
            assert own["calls"].sum() / whole.steps == part.calls_per_step


def test_cells_hold_the_steps_of_their_range_and_no_others():
    steps = server(1)
    cells = means(counts_of(instance(steps)).filter(pl.col("time") == "step_us"))
    assert cells["steps"].sum() == steps.height
    for row in cells.filter(pl.col("running_from") < 8).iter_rows(named=True):
        own = steps.filter(
            (pl.col("running") == row["running_from"])
            & pl.col("cache_size").is_between(
                row["cache_from"], row["cache_from"] + 999
            )
        )
        assert own.height == row["steps"]
        assert row["us"] == pytest.approx(own["step_us"].mean(), rel=1e-6)
    assert set(cells["running_from"]) == {*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32}


def test_the_slope_in_cache_is_found_beside_that_in_requests():
    found = slope(counts_of(instance(server(2))).filter(pl.col("time") == METHOD))
    # The stalls alone make it as unsure as that.
    assert found == pytest.approx(3.0, abs=1.0)
    steps = server(2).with_columns(cache_size=pl.lit(9_000))
    still = counts_of(instance(steps)).filter(pl.col("time") == METHOD)
    assert slope(still) is None


def test_records_without_cache_size_have_no_slope():
    rows = [(300.0, 5.0, None, None)] * 50
    assert slope(counted(rows).filter(pl.col("time") == METHOD)) is None
