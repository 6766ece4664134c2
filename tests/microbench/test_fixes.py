# SPDX-License-Identifier: Apache-2.0
"""What report.html says of the fixes is what the configs' steps say."""

from __future__ import annotations

import copy

import msgspec
import pytest

from kvtax.records.per_config import PerConfig
from kvtax.records.run import ReadCounts, RunRecord
from kvtax.report.markdown import TIMES
from kvtax.verdict.roles import roles_of
from microbench.summary import tables
from tests.microbench.synthetic import (
    PROFILE,
    Truth,
    configured_roles,
    report_of,
    write_run,
)

pytestmark = pytest.mark.slow

TRUTHS = [
    Truth("noop", build_meta=0.8, get_finished=0.8),
    Truth("mooncake_both", build_meta=1.0, get_finished=200.0),
    Truth("mooncake_both_hash_sync", slope=60.0, build_meta=2.0, get_finished=200.0),
    Truth("mooncake_both_delta", build_meta=2.0, get_finished=200.0),
    Truth("mooncake_both_fixed", build_meta=1.0, get_finished=0.8),
]


def before_and_after(document) -> list:
    """The sections as the page holds them: the table and the aims, or none."""
    told = msgspec.convert(document, PerConfig)
    run = RunRecord(profile=PROFILE, configs=configured_roles(told.configs))
    made = tables.before_and_after(told, roles_of(run, told.configs))
    return msgspec.to_builtins(made)


def row_of(table: dict, name: str) -> list:
    (row,) = (row for row in table["rows"] if row[0] == name)
    return row


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(write_run(tmp_path_factory.mktemp("run"), TRUTHS, repeats=2))


@pytest.fixture
def document(report):
    return copy.deepcopy(report.document)


def test_the_section_compares_all_from_noop_to_all_fixes(report, document):
    made = before_and_after(document)
    assert [report.page["by_title"][one["title"]] for one in made] == made
    assert [row[0] for row in made[0]["rows"]] == [truth.name for truth in TRUTHS]
    assert (report.folder / "figures" / "before_after.png").exists()


def test_ratios_to_noop_are_those_of_the_steps(document):
    configs = document["configs"]
    assert configs["noop"]["vs_noop"] is None
    for name in ("mooncake_both", "mooncake_both_fixed"):
        ratio = configs[name]["vs_noop"]["step"]
        levels = [configs[c]["step_us"]["p50"] for c in (name, "noop")]
        assert ratio["value"] == pytest.approx(levels[0] / levels[1], abs=0.01)
        assert ratio["ci95"][0] <= ratio["value"] <= ratio["ci95"][1]
    _, aims = before_and_after(document)
    assert "missed" not in [row[-1] for row in aims["rows"]]


@pytest.mark.parametrize(
    ("ci95", "verdict"),
    [
        ([0.97, 1.049], "met"),
        ([1.01, 1.06], "undecided"),
        ([1.06, 1.2], "missed"),
    ],
)
def test_an_aim_is_met_only_where_the_whole_interval_says_so(document, ci95, verdict):
    ratio = {"value": sum(ci95) / 2, "ci95": ci95}
    document["configs"]["mooncake_both_fixed"]["vs_noop"] = {"step": ratio}
    _, aims = before_and_after(document)
    aim = row_of(aims, "p50 of step_us of mooncake_both_fixed")
    assert aim[-1] == verdict


def test_a_run_without_an_aim_has_no_such_section(document):
    for name in ("mooncake_both_delta", "mooncake_both_fixed"):
        del document["configs"][name]
    assert before_and_after(document) == []


def test_what_a_peer_read_meanwhile_is_stated_beside_what_it_cost(tmp_path):
    reads = ReadCounts(reads=40, blocks_offered=8000, blocks_valid=7900, seconds=4.0)
    truths = [
        Truth("noop", build_meta=0.8),
        Truth("direct_read_serving", build_meta=0.8, reads=reads),
    ]
    report = report_of(write_run(tmp_path, truths, steps=900))
    table, aims = before_and_after(report.document)
    # Of both repeats.
    assert "read 80 prefixes of 200 blocks, 10.0 per second; 98.75%" in table["note"]
    aim = row_of(aims, "p50 of step_us of direct_read_serving")
    assert aim[1:3] == [f"at most 1.02 {TIMES} that of noop", "ours"]


def test_p90_stands_beside_p50_where_the_reference_study_used_p90(document):
    entry = document["configs"]["mooncake_both"]
    step, tpot = entry["step_us"], entry["tpot_ms"]
    table, _ = before_and_after(document)
    row = row_of(table, "mooncake_both")
    assert f"{step['p50']:,.1f}/{step['p90']:,.1f}" in row
    assert f"{tpot['p50']:,.3f}/{tpot['p90']:,.3f}" in row
