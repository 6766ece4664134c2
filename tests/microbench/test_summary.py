# SPDX-License-Identifier: Apache-2.0
"""What a report says of configs, fixes and hosts is true of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtax.cli import main
from kvtax.engine.connector import connector_names, load_connector
from kvtax.records.files import read_document
from kvtax.records.per_config import PerConfig
from kvtax.records.run import HostRecord, ReadCounts, Role, RunRecord
from kvtax.report.markdown import TIMES
from kvtax.verdict.roles import ExpectedVerdict, roles_of
from microbench.on_hosts import note
from microbench.profile import load_profile
from microbench.report import report
from microbench.summary import tables
from tests.microbench.synthetic import (
    PROFILE,
    Report,
    Truth,
    configured_roles,
    page_of,
    report_of,
    write_run,
)

CONNECTORS = [name for name in connector_names() if "/" not in name]
TRUTHS = [
    Truth("plain"),
    Truth("plain_aa"),
    Truth("noop", build_meta=0.8),
    Truth("mooncake_both_hash_sync", slope=60.0, build_meta=2.0),
    Truth("mooncake_both_fixed", build_meta=1.0),
]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Draw pictures of the shared report alone: they take longer than all the rest."""
    monkeypatch.setattr("kvtax.report.png.draw", lambda *_: None)


def reported(folder: Path, truths: list[Truth], **run: Any) -> Report:
    """The report of a made-up run."""
    return report_of(write_run(folder, truths, repeats=1, steps=1_500, **run))


@pytest.mark.slow
def test_other_names_with_the_same_roles_give_the_same_report(tmp_path: Path):
    names = {truth.name: f"config_{n}" for n, truth in enumerate(TRUTHS)}
    roles = {
        names[old]: msgspec.to_builtins(load_connector(old).report) for old in names
    }
    renamed = [replace(truth, name=names[truth.name]) for truth in TRUTHS]
    # The roles of the first run are those of the TOML files.
    first = reported(tmp_path / "a", TRUTHS)
    second = reported(tmp_path / "b", renamed, configs=roles)
    # Longer names first: one is the start of another.
    other = second.summary
    for old in sorted(names, key=len, reverse=True):
        other = other.replace(names[old], old)
    assert other == first.summary
    assert list(second.document["configs"].values()) == list(
        first.document["configs"].values()
    )


@pytest.mark.slow
def test_a_config_without_a_role_is_measured_like_any_other(tmp_path: Path):
    report = reported(
        tmp_path, [Truth("newcomer", build_meta=3.0)], configs={"newcomer": {}}
    )
    entry = report.document["configs"]["newcomer"]
    assert entry["verdict"] != "failed" and entry["schedule_us"]["p50"] > 0
    assert entry["vs_plain"] is None and entry["vs_noop"] is None
    assert "| `newcomer` |" in report.summary


@pytest.mark.slow
def test_of_two_baselines_the_first_counts_and_the_reader_is_told(tmp_path: Path):
    roles = {name: {"role": "baseline"} for name in ("first", "second")}
    truths = [Truth("first"), Truth("second")]
    document = reported(tmp_path, truths, configs=roles).document
    assert document["configs"]["first"]["vs_plain"] is None
    assert document["configs"]["second"]["vs_plain"]
    assert any("first, second have the role" in text for text in document["warnings"])


KNOWN = "Configs whose verdict is known"


def run_all(
    folder, monkeypatch, expected: dict[str, str], arguments: tuple[str, ...] = ()
) -> int:
    """Return the exit code of a sweep in which `walk` grows and `plain` is flat."""

    def made_up(run_dir, *_):
        write_run(run_dir, [Truth("plain"), Truth("walk", slope=40.0)], configs=roles)
        return []

    roles = {name: Role(expected=verdict) for name, verdict in expected.items()}
    monkeypatch.setattr("microbench.sweep.sweep", made_up)
    # Nothing is measured here, so another process may be measuring.
    monkeypatch.setattr("kvtax.proc.machine_lock.machine_lock", nullcontext)
    return main(["sweep", *(arguments or ["--out", str(folder)])])


@pytest.mark.slow
def test_a_sweep_that_finds_what_it_must_ends_well(tmp_path, monkeypatch):
    assert run_all(tmp_path / "run", monkeypatch, {"walk": "grows"}) == 0
    summary = (tmp_path / "run" / "SUMMARY.md").read_text()
    assert "Known verdicts: 1, of which 1 right." in summary
    (row,) = page_of(tmp_path / "run")["by_title"][KNOWN]["rows"]
    assert row[:4] == ["walk", "grows", "grows", "right"]


@pytest.mark.slow
def test_a_sweep_that_misses_names_the_config_and_both_verdicts(
    tmp_path, monkeypatch, capsys
):
    told = {"walk": "flat", "plain": "grows"}
    assert run_all(tmp_path / "run", monkeypatch, told) == 1
    printed = capsys.readouterr().out
    assert "walk: expected flat, found grows" in printed
    assert "plain: expected grows, found flat" in printed
    summary = (tmp_path / "run" / "SUMMARY.md").read_text()
    assert "Known verdicts: 2, of which 1 false flat, 1 false grows." in summary


@pytest.mark.slow
def test_a_run_in_which_nothing_is_known_says_nothing(tmp_path, monkeypatch):
    assert run_all(tmp_path / "run", monkeypatch, {}) == 0
    assert "Known verdicts" not in (tmp_path / "run" / "SUMMARY.md").read_text()
    assert KNOWN not in page_of(tmp_path / "run")["by_title"]


@pytest.mark.parametrize(
    ("expected", "found", "kind"),
    [
        ("grows", "grows", "right"),
        ("grows", "flat", "false flat"),
        ("drifts", "flat", "false flat"),
        ("flat", "grows", "false grows"),
        ("drifts", "grows", "false grows"),
        ("grows", "drifts", "wrong"),
        ("flat", "inconclusive", "undecided"),
        ("flat", "failed", "undecided"),
    ],
)
def test_no_answer_is_told_from_a_wrong_one(expected, found, kind):
    assert ExpectedVerdict("some", expected, found).kind == kind


def test_the_profile_measures_every_connector_with_a_known_cost():
    known = {name for name in connector_names() if name.startswith("synthetic/")}
    configs = load_profile("synthetic").configs
    assert known <= set(configs)
    assert len(configs) == len(set(configs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "is_reference"),
    [
        (("--profile", "cpu"), True),
        (("--profile", "cpu-smoke"), False),
        (("--only", "plain"), False),
        (("--repeats", "1"), False),
    ],
)
def test_only_a_whole_default_run_puts_its_result_into_the_checkout(
    tmp_path, monkeypatch, capsys, arguments, is_reference
):
    pages: list[object] = []
    monkeypatch.setattr("kvtax.paths.REPOSITORY", tmp_path / "checkout")
    monkeypatch.setattr("microbench.command._write_figures_into_pages", pages.append)
    monkeypatch.setattr("kvtax.run_folder.REPOSITORY", tmp_path / "checkout")
    (tmp_path / "checkout").mkdir()
    assert run_all(tmp_path, monkeypatch, {}, arguments) == 0
    printed = capsys.readouterr().out
    (run,) = (tmp_path / "checkout" / "runs").iterdir()
    out = tmp_path / "checkout" if is_reference else run
    assert f"sweep: {out / 'SUMMARY.md'}" in printed
    assert (out / "per_config.json").is_file()
    assert (run / "SUMMARY.md").exists() is not is_reference
    assert len(pages) == is_reference
    *_, plain, walk = printed.splitlines()
    assert plain.split()[:3] == ["plain", "at", "most"]
    assert walk.split()[:2] == ["walk", "grows"]


FIXES = [
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
def fixes_report(tmp_path_factory):
    return report_of(write_run(tmp_path_factory.mktemp("run"), FIXES, repeats=2))


@pytest.fixture
def document(fixes_report):
    return copy.deepcopy(fixes_report.document)


@pytest.mark.slow
def test_the_section_compares_all_from_noop_to_all_fixes(fixes_report, document):
    made = before_and_after(document)
    assert [fixes_report.page["by_title"][one["title"]] for one in made] == made
    assert [row[0] for row in made[0]["rows"]] == [truth.name for truth in FIXES]
    assert (fixes_report.folder / "figures" / "held_levels.png").exists()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci95", "verdict"),
    [([0.97, 1.049], "met"), ([1.01, 1.06], "undecided"), ([1.06, 1.2], "missed")],
)
def test_an_aim_is_met_only_where_the_whole_interval_says_so(document, ci95, verdict):
    ratio = {"value": sum(ci95) / 2, "ci95": ci95}
    document["configs"]["mooncake_both_fixed"]["vs_noop"] = {"step": ratio}
    _, aims = before_and_after(document)
    aim = row_of(aims, "p50 of step_us of mooncake_both_fixed")
    assert aim[-1] == verdict


@pytest.mark.slow
def test_a_run_without_an_aim_has_no_such_section(document):
    for name in ("mooncake_both_delta", "mooncake_both_fixed"):
        del document["configs"][name]
    assert before_and_after(document) == []


@pytest.mark.slow
def test_what_a_peer_read_meanwhile_is_stated_beside_what_it_cost(tmp_path):
    reads = ReadCounts(reads=40, blocks_offered=8000, blocks_valid=7900, seconds=4.0)
    truths = [
        Truth("noop", build_meta=0.8),
        Truth("direct_read_serving", build_meta=0.8, reads=reads),
    ]
    fixes_report = report_of(write_run(tmp_path, truths, steps=900))
    table, aims = before_and_after(fixes_report.document)
    # Of both repeats.
    assert "read 80 prefixes of 200 blocks, 10.0 per second; 98.75%" in table["note"]
    aim = row_of(aims, "p50 of step_us of direct_read_serving")
    assert aim[1:3] == [f"at most 1.02 {TIMES} that of noop", "ours"]


@pytest.mark.slow
def test_p90_stands_beside_p50_where_the_reference_study_used_p90(document):
    entry = document["configs"]["mooncake_both"]
    step, tpot = entry["step_us"], entry["tpot_ms"]
    table, _ = before_and_after(document)
    row = row_of(table, "mooncake_both")
    assert f"{step['p50']:,.1f}/{step['p90']:,.1f}" in row
    assert f"{tpot['p50']:,.3f}/{tpot['p90']:,.3f}" in row


SLOWER_US = 40.0


def host(name: str, *repeats: int) -> HostRecord:
    return HostRecord(name, list(repeats), {"cpu_model": f"CPU of {name}"})


@pytest.mark.slow
def test_each_host_has_the_levels_of_its_own_repeats(tmp_path: Path) -> None:
    offsets = (0.0, SLOWER_US, 0.0, SLOWER_US)
    configs = [Truth("plain", repeat_offsets=offsets), Truth("noop", fails="broken")]
    write_run(tmp_path, configs, repeats=4, hosts=[host("a", 0, 2), host("b", 3, 1)])
    report(tmp_path, tmp_path)
    found = read_document(tmp_path / "per_config.json", PerConfig).hosts
    assert list(found) == ["a", "b"]
    assert found["b"].repeats == [1, 3]
    assert found["b"].cpu_model == "CPU of b"
    assert found["a"].send_lag_p99_ms == 0.5
    assert (found["a"].servers, found["a"].servers_that_count) == (4, 2)
    levels = {name: one.p50_us["plain"]["schedule"] for name, one in found.items()}
    assert levels["b"] - levels["a"] == pytest.approx(SLOWER_US, rel=0.1)
    assert "| b | CPU of b | 1, 3 | 4 | 2 |" in (tmp_path / "SUMMARY.md").read_text()
    assert len(page_of(tmp_path)["by_title"]["Hosts"]["rows"]) == 2


@pytest.mark.slow
def test_a_run_on_one_machine_has_no_table_of_hosts(tmp_path: Path) -> None:
    write_run(tmp_path, [Truth("plain")])
    report(tmp_path, tmp_path)
    assert read_document(tmp_path / "per_config.json", PerConfig).hosts is None
    assert "## Hosts" not in (tmp_path / "SUMMARY.md").read_text()
    assert "Hosts" not in page_of(tmp_path)["by_title"]


def test_a_repeat_that_is_made_again_belongs_to_who_made_it_last() -> None:
    run = RunRecord(profile=PROFILE, hosts=[])
    for name, repeat in (("a", 0), ("b", 1), ("a", 2), ("b", 0)):
        note(run, name, repeat, {})
    assert {one.host: one.repeats for one in run.hosts} == {"a": [2], "b": [1, 0]}
