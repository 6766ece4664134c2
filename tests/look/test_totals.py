# SPDX-License-Identifier: Apache-2.0
"""Counts of steps add up: of servers, of hosts, through files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax.look.instance_summary import cost
from kvtax.look.instance_summary import quantiles as exact_quantiles
from kvtax.look.instances import Instance, read_instances
from kvtax.look.totals import (
    ALPHA,
    NOTHING,
    counts_of,
    merge_totals,
    merged,
    quantiles,
    read_totals,
    totals_of,
)
from kvtax.records import RecordsError
from kvtax.records.steps import ENGINE_COUNTS, EngineHeader
from tests.look.conftest import main
from tests.look.made_up_server import FIRST_NS, Server, served


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Path]:
    """Folders of records: two servers, and one."""
    for seed, server in enumerate(("one/a", "one/b", "two/a")):
        served(tmp_path / server, seed=seed).write()
    return {"one": tmp_path / "one", "two": tmp_path / "two"}


@pytest.mark.slow
def test_files_of_hosts_are_merged_into_what_one_look_says(
    hosts: dict[str, Path], tmp_path: Path, capsys
) -> None:
    files = []
    for name, folder in hosts.items():
        files.append(str(tmp_path / f"{name}.parquet"))
        told = ["--summary", files[-1], "--host", name]
        assert main([str(folder), *told]) == 0
    assert main([*files, "--summary", str(tmp_path / "all.parquet")]) == 0
    told = capsys.readouterr().out
    assert "one.parquet: vLLM 0.18.1, 800 steps of 2 servers" in told
    assert "all: vLLM 0.18.1, 1,200 steps of 3 servers" in told
    whole = read_totals(tmp_path / "all.parquet")
    assert [server.name for server in whole.servers] == ["one/a", "one/b", "two/a"]
    instances, _ = read_instances(tmp_path)
    steps = pl.concat(one.steps for one in instances)
    step = whole.counts.filter(pl.col("time") == "step_us")
    assert step["steps"].sum() == steps.height
    mean_us = step["sum_ns"].sum() / steps.height / 1e3
    assert mean_us == pytest.approx(steps["step_us"].mean(), rel=1e-6)
    assert f"{mean_us:,.1f}" in told
    for server, instance in zip(whole.servers, instances, strict=True):
        for part in cost(instance).methods:
            assert server.us[part.column] == pytest.approx(part.mean_us, abs=1e-3)
    # A file of merged files is one more file of that kind.
    assert main([str(tmp_path / "all.parquet")]) == 0
    assert capsys.readouterr().out in told


def test_in_parts_and_in_any_order_it_is_the_same(hosts: dict[str, Path]) -> None:
    one, two = (totals_of(folder, name) for name, folder in hosts.items())
    both, other = merge_totals([one, two]), merge_totals([two, one])
    assert both.counts.equals(other.counts)
    assert both.servers == other.servers
    nothing = merge_totals([])
    assert merge_totals([one, nothing]).counts.equals(one.counts)


def test_no_server_is_counted_twice(hosts: dict[str, Path], tmp_path: Path) -> None:
    file = str(tmp_path / "one.parquet")
    assert main([str(hosts["one"]), "--summary", file, "--host", "one"]) == 0
    one = read_totals(Path(file))
    with pytest.raises(RecordsError, match="one/a, one/b would be counted twice"):
        merge_totals([one, one])
    again = tmp_path / "again.parquet"
    again.write_bytes(Path(file).read_bytes())
    assert main([file, str(again)]) == 2


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1")
    assert main([str(bad)]) == 2
    assert (
        "bad.parquet: not a file that kvtax look --summary" in capsys.readouterr().err
    )
    pl.DataFrame({"a": [1]}).write_parquet(bad)
    assert main([str(bad)]) == 2
    assert main([str(tmp_path), "--summary", str(bad)]) == 2
    assert "no engine_step.jsonl" in capsys.readouterr().err


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
    nothing = [name for name in ENGINE_COUNTS if name not in steps.columns]
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
def test_to_count_two_parts_and_add_in_any_order_is_to_count_all(one, other):
    whole, parts = counted(one + other), [counted(one), counted(other), NOTHING]
    assert merged(parts).equals(whole)
    assert merged(reversed(parts)).equals(whole)
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
    step = counts_of(instance(steps)).filter(pl.col("time") == "step_us")
    cells = step.group_by("cache_from", "running_from").agg(
        pl.col("steps", "sum_ns").sum()
    )
    assert cells["steps"].sum() == steps.height
    for row in cells.filter(pl.col("running_from") < 8).iter_rows(named=True):
        own = steps.filter(
            (pl.col("running") == row["running_from"])
            & pl.col("cache_size").is_between(
                row["cache_from"], row["cache_from"] + 999
            )
        )
        assert own.height == row["steps"]
        us = row["sum_ns"] / row["steps"] / 1e3
        assert us == pytest.approx(own["step_us"].mean(), rel=1e-6)
    assert set(cells["running_from"]) == {*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32}


def filling(folder: Path, steps: int, resets: int) -> Path:
    """A server whose connector takes 3 us more per 1,000 cached blocks."""
    rng = np.random.default_rng(5)
    made = Server(folder)
    for number in range(steps):
        blocks = int(number * (resets + 1) / steps % 1 * 17_500)
        us = 5 + 3e-3 * blocks + rng.exponential(4)
        made.step(build_meta_us=us, cache_size=blocks)
    return made.write()


@pytest.mark.slow
def test_a_slope_is_that_of_each_server_and_unknown_where_time_may_be_the_reason(
    tmp_path, capsys
):
    filling(tmp_path / "records" / "often", 3_000, 5)
    filling(tmp_path / "records" / "once", 3_000, 0)
    often, once = totals_of(tmp_path / "records", "host").servers
    assert often.slopes[METHOD] == pytest.approx(3.0, abs=0.1)
    assert once.slopes[METHOD] is None
    assert main([str(tmp_path / "records"), "--summary", str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "a")]) == 0
    assert "per 1,000 cached blocks: +3.0" in capsys.readouterr().out


def test_shares_of_totals_are_of_the_time_that_steps_cover(tmp_path, capsys):
    made = Server(tmp_path / "records")
    for _ in range(200):
        made.step(build_meta_us=500, get_finished_us=0, model_us=9_535)
    for record in (*made.steps, *made.workers):
        record["t_ns"] = FIRST_NS + 5_000_000 * record["step_id"]
    made.write()
    assert main([str(made.folder), "--summary", str(tmp_path / "a")]) == 0
    assert main([str(tmp_path / "a")]) == 0
    (row,) = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  connector ")
    ]
    assert row[-1] == "10.0%"
