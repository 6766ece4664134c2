# SPDX-License-Identifier: Apache-2.0
"""Statements on configs, from tables of holds alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from kvtax.records.per_config import (
    ConfigEvidence,
    Evidence,
    MachineRecord,
    Measured,
    ServerConditions,
)
from kvtax.records.profile import Ladder
from kvtax.records.run import Role, RunRecord
from kvtax.verdict.analysis import Analysis, judge
from kvtax.verdict.machine import graded, undisturbed
from kvtax.verdict.statements import Statements, decisive
from kvtax.verdict.warnings import largest_relative_bound, open_metrics
from tests.harness.made_up import profile

LADDER = Ladder([0.0, 0.3, 0.6, 0.92, 1.0], 4, 8, 56, 3, 24.0)
SHARES = np.array(LADDER.levels)
FACTS = Measured(
    n_window_steps=1_000,
    n_repeats=2,
    requests=dict.fromkeys(("scheduled", "ok", "failed", "cancelled"), 0),
    lag_ms=None,
    records=dict.fromkeys(("engine_steps", "engine_without_worker", "torn_lines"), 0),
)


def holds(
    seed: int,
    cost_us: float = 110.0,
    full_us: float = 0.0,
    servers: int = 2,
    speed: float = 1.0,
    noise: float = 0.01,
) -> dict[str, list[float | None]]:
    """Make the columns of servers that take `cost_us` of each 650 us of own work.

    A full cache adds `full_us`. The machine's `speed` changes from hold to hold.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for repeat in range(servers):
        level = np.concatenate([rng.permutation(5) for _ in range(4)])
        slow = speed * (1 + 0.4 * rng.random(len(level)))
        for number, (at, factor) in enumerate(zip(level, slow, strict=True)):
            us = cost_us + full_us * SHARES[at]
            us *= 1 + noise * rng.standard_normal()
            rows.append(
                {
                    "repeat": repeat,
                    "hold": number,
                    "level": at,
                    "many": 0,
                    "cache_blocks": 18_000 * SHARES[at],
                    "age_s": float(rng.uniform(0, 5)),
                    "time_s": 1_000.0 * repeat + 3.0 * number,
                    "timed": factor * us,
                    "schedule": factor * us,
                    "step": factor * (us + 650),
                    "processes": factor * (us + 1_500),
                    "threads": 0.0,
                    "own": factor * 650.0,
                    "steps": 56,
                    "long": 0,
                }
            )
    return pl.DataFrame(rows).to_dict(as_series=False)


ROLES = {
    "plain": Role(role="baseline"),
    "plain_aa": Role(role="twin"),
    "noop": Role(role="floor"),
}


def evidence(**configs: dict[str, list[float | None]]) -> Evidence:
    return Evidence(
        run=RunRecord(profile=profile(LADDER), configs=ROLES),
        report_git_commit=None,
        window=None,
        configs={
            name: ConfigEvidence(facts=FACTS, holds=columns)
            for name, columns in configs.items()
        },
    )


def analysed(**configs: dict[str, list[float | None]]) -> Analysis:
    usual = {"plain": holds(1), "plain_aa": holds(2), "noop": holds(3)}
    return judge(evidence(**usual | configs))


@pytest.mark.slow
def test_costs_are_shares_of_own_work_whatever_the_machines_speed():
    values = {}
    for speed in (1.0, 2.5):
        configs = {
            name: holds(seed, cost, full, speed=speed)
            for name, seed, cost, full in (
                ("plain", 1, 110.0, 0.0),
                ("plain_aa", 2, 110.0, 0.0),
                ("mine", 3, 240.0, 800.0),
            )
        }
        mine = judge(evidence(**configs)).document.configs["mine"]
        assert mine.verdict == "grows"
        values[speed] = mine
    once, slow = values[1.0], values[2.5]
    assert once.over_baseline.percent == slow.over_baseline.percent
    assert once.full_adds.percent == slow.full_adds.percent
    # 800 us of 650, and 130 + 0.92 * 800 of 650 at the stated level.
    assert once.full_adds.percent.value == pytest.approx(123, rel=0.03)
    assert once.over_baseline.percent.value == pytest.approx(133, rel=0.03)
    # The microseconds are those of each machine.
    assert slow.full_adds.us == pytest.approx(2.5 * once.full_adds.us, rel=0.01)


@pytest.mark.slow
def test_an_interval_holds_a_server_that_is_not_measured():
    """Servers that differ by a tenth make the statement on a growing config wider."""
    alike = analysed(mine=holds(4, 110.0, 800.0, servers=3))
    apart = {name: list(column) for name, column in holds(4, 110.0, 800.0, 3).items()}
    for row, repeat in enumerate(apart["repeat"]):
        apart["timed"][row] *= (0.85, 1.0, 1.2)[int(repeat)]
    differing = analysed(mine=apart)
    narrow, wide = (
        analysis.document.configs["mine"].full_adds.percent
        for analysis in (alike, differing)
    )
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    # Nearly as low as the lowest of the three.
    assert wide.low < 0.9 * narrow.value


@pytest.mark.slow
def test_the_baseline_is_the_pair_where_both_are_alike():
    document = analysed(mine=holds(4, 240.0)).document
    assert (document.baseline, document.floor) == ("plain", "noop")
    assert not document.noise_floor.differs
    low, high = document.configs["plain_aa"].over_baseline.percent.ci95
    assert low < 0 < high
    assert document.configs["plain"].over_baseline is None
    assert document.configs["mine"].over_baseline.percent.low > 0


@pytest.mark.slow
def test_where_equal_configs_differ_nothing_is_compared_and_that_is_said_first():
    analysis = analysed(plain_aa=holds(2, 200.0), mine=holds(4, 240.0, 800.0))
    document = analysis.document
    assert document.noise_floor.differs
    assert all(entry.over_baseline is None for entry in document.configs.values())
    assert document.configs["mine"].vs_noop == {}
    assert analysis.warnings[None][0].kind == "equals_differ"
    # Growth is of one config's own servers.
    assert document.configs["mine"].verdict == "grows"


def test_a_ratio_is_to_the_floor_and_has_an_interval():
    ratio = analysed(mine=holds(4, 220.0)).document.configs["mine"].vs_noop["schedule"]
    assert ratio.value == pytest.approx(2.0, rel=0.03)
    assert ratio.low < 2 < ratio.high


def test_what_decides_is_what_the_run_measured():
    table = pl.DataFrame({"timed": [1.0], "threads": [0.0]})
    assert decisive(table, LADDER, reads_cpu=True) == {"timed", "threads"}
    assert decisive(table, LADDER, reads_cpu=False) == {"timed"}
    calls = table.with_columns(calls=pl.lit(1.0))
    needed = decisive(calls, LADDER, reads_cpu=True)
    assert needed == {"calls", "prefill", "threads"}
    many = Ladder(LADDER.levels, 1, 8, 56, 3, 24.0, many_decoders=32)
    assert decisive(calls, many, reads_cpu=True) == needed | {"calls_many"}


@pytest.mark.slow
def test_the_doubt_is_that_of_the_least_known_metric_by_its_margin():
    entry = analysed(mine=holds(4, 110.0, noise=0.3)).document.configs["mine"]
    assert entry.verdict == "inconclusive"
    assert open_metrics(entry) == ["timed"]
    assert largest_relative_bound(entry) == pytest.approx(entry.held["timed"].most / 5)
    flat = analysed(mine=holds(4)).document.configs["mine"]
    assert flat.verdict == "flat" and largest_relative_bound(flat) == 0


@pytest.mark.slow
def test_all_columns_of_a_table_are_fitted_at_one_level_methods_too():
    columns = holds(4, 110.0, 800.0)
    columns["worker.get_finished"] = columns["timed"]
    held = analysed(mine=columns).document.configs["mine"].held
    part, whole = held["worker.get_finished"].full_adds, held["timed"].full_adds
    assert part.value == whole.value
    assert part.ci95 == pytest.approx(whole.ci95, abs=0.5)


def conditions(*others_cores: float) -> MachineRecord:
    servers = [
        ServerConditions("plain", repeat, 0.0, cores)
        for repeat, cores in enumerate(others_cores)
    ]
    return MachineRecord(2, servers)


def table_of(**columns: float) -> pl.DataFrame:
    """Make eight holds of each of two servers."""
    rows = {"repeat": [0] * 8 + [1] * 8, "many": [0] * 16, "own": [650.0] * 16}
    table = pl.DataFrame(rows)
    return table.with_columns(pl.lit(value).alias(k) for k, value in columns.items())


@pytest.mark.parametrize(
    ("columns", "others", "grade", "refused"),
    [
        ({}, (0.0, 0.1), "quiet", False),
        # Older runs say how much of a core others took.
        ({}, (0.0, 0.31), "disturbed", True),
        # Half of the time without a core: a neighbour has the engine's own.
        ({"engine": 700.0, "waited": 700.0}, (0.0, 0.0), "disturbed", True),
        # Others on the other core leave the engine alone.
        ({"engine": 700.0, "waited": 30.0}, (0.9, 0.9), "quiet", False),
    ],
)
def test_a_neighbour_on_the_engines_core_is_told_and_one_beside_it_is_not(
    columns, others, grade, refused
):
    entry = graded(conditions(*others), {"plain": table_of(**columns)}, None)
    assert (entry.grade, entry.refused) == (grade, refused)


def test_a_machine_whose_speed_changes_is_busy():
    own = [650.0, 1_000.0] * 8
    table = table_of().with_columns(pl.Series("own", own))
    entry = graded(conditions(0.0, 0.0), {"plain": table}, None)
    assert entry.grade == "busy" and "1.54 times" in entry.reasons[0]
    assert entry.own_us == 825.0
    apart = table_of().with_columns(pl.Series("own", [650.0] * 8 + [800.0] * 8))
    assert graded(conditions(0.0, 0.0), {"plain": apart}, None).grade == "busy"


def test_a_disturbed_server_does_not_count():
    entry = graded(conditions(0.0, 0.0, 0.0, 0.0, 0.9), {"plain": table_of()}, None)
    assert entry.grade == "disturbed" and not entry.refused
    assert "r4: other processes took 0.90 of a core" in entry.reasons[0]
    machine = graded(conditions(0.0, 0.9), {"plain": table_of()}, "plain")
    kept = undisturbed({"plain": table_of()}, machine)
    assert kept["plain"]["repeat"].to_list() == [0] * 8
    assert undisturbed({"plain": table_of()}, None)["plain"].height == 16


def test_a_refused_run_judges_nothing():
    run = evidence(plain=holds(1), mine=holds(2, 110.0, 800.0))
    servers = [
        ServerConditions(n, r, 0.0, 0.9) for n in ("plain", "mine") for r in (0, 1)
    ]
    run.machine = MachineRecord(2, [*servers, ServerConditions("mine", 2, 0.0, 0.0)])
    analysis = judge(run)
    assert analysis.document.machine.refused
    verdicts = {e.verdict for e in analysis.document.configs.values()}
    assert verdicts == {"inconclusive"}
    assert analysis.warnings[None][0].kind == "refused"


def test_a_hold_in_which_the_engine_had_no_core_does_not_count():
    waited = [700.0, 30.0, 30.0, 30.0] * 4
    table = table_of(engine=700.0).with_columns(pl.Series("waited", waited))
    entry = graded(conditions(0.0, 0.0), {"plain": table}, None)
    assert (entry.grade, entry.refused) == ("busy", False)
    assert [server.holds_out for server in entry.servers] == [0.25, 0.25]
    kept = undisturbed({"plain": table}, entry)["plain"]
    assert kept["waited"].to_list() == [30.0] * 12


def test_an_older_run_has_no_grade():
    assert graded(None, {}, None) is None


def test_statements_have_one_level():
    tables = {"mine": pl.DataFrame(holds(4))}
    narrow, wide = (Statements.of(tables, LADDER, level) for level in (0.95, 0.99))
    assert narrow.full_adds("mine").percent.low > wide.full_adds("mine").percent.low
