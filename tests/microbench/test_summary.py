# SPDX-License-Identifier: Apache-2.0
"""What a report says of configs, fixes and hosts is true of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtax.cli import main
from kvtax.engine.connector import connector_names, load_connector
from kvtax.records.files import read_document
from kvtax.records.per_config import MachineEntry, PerConfig
from kvtax.records.run import HostRecord, Role, RunRecord
from kvtax.verdict.roles import ExpectedVerdict
from microbench.on_hosts import note
from microbench.profile import load_profile
from microbench.report import report
from tests.microbench.synthetic import (
    PROFILE,
    Report,
    Truth,
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
    assert entry["over_baseline"] is None and entry["vs_noop"] == {}
    assert "| `newcomer` |" in report.summary


@pytest.mark.slow
def test_of_two_baselines_the_first_counts_and_the_reader_is_told(tmp_path: Path):
    roles = {name: {"role": "baseline"} for name in ("first", "second")}
    truths = [Truth("first"), Truth("second")]
    document = reported(tmp_path, truths, configs=roles).document
    assert document["baseline"] == "first"
    assert document["configs"]["first"]["over_baseline"] is None
    assert document["configs"]["second"]["over_baseline"] is not None
    assert any("first, second have the role" in text for text in document["warnings"])


KNOWN = "Configs of known cost"


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
    expected_verdicts = {"walk": "flat", "plain": "grows"}
    assert run_all(tmp_path / "run", monkeypatch, expected_verdicts) == 1
    printed = capsys.readouterr().out
    assert "walk: expected flat, is grows" in printed
    assert "plain: expected grows, is flat" in printed
    summary = (tmp_path / "run" / "SUMMARY.md").read_text()
    assert "Known verdicts: 2, of which 1 false flat, 1 false grows." in summary


@pytest.mark.slow
def test_a_refused_sweep_has_no_answer(tmp_path, monkeypatch, capsys):
    refused = MachineEntry("disturbed", [], True, 2, 600.0, [])
    monkeypatch.setattr("kvtax.verdict.analysis.graded", lambda *_: refused)
    assert run_all(tmp_path / "run", monkeypatch, {}) == 0
    for text in (capsys.readouterr().out, (tmp_path / "run/SUMMARY.md").read_text()):
        assert "There is no answer" in text
        assert "A full cache adds to a user's token" not in text


@pytest.mark.slow
def test_a_run_in_which_nothing_is_known_says_nothing(tmp_path, monkeypatch):
    assert run_all(tmp_path / "run", monkeypatch, {}) == 0
    assert "Known verdicts" not in (tmp_path / "run" / "SUMMARY.md").read_text()
    assert KNOWN not in page_of(tmp_path / "run")["by_title"]


@pytest.mark.parametrize(
    ("expected", "verdict", "kind"),
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
def test_no_answer_is_told_from_a_wrong_one(expected, verdict, kind):
    assert ExpectedVerdict("some", expected, verdict).kind == kind


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
    table = printed.partition("Cost per engine step")[2]
    rows = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "flat" in rows["plain"] and "grows" in rows["walk"]


SLOWER_US = 40.0


def host_of(name: str, *repeats: int) -> HostRecord:
    return HostRecord(name, list(repeats), {"cpu_model": f"CPU of {name}"})


@pytest.mark.slow
def test_each_host_has_the_levels_of_its_own_repeats(tmp_path: Path) -> None:
    offsets = (0.0, SLOWER_US, 0.0, SLOWER_US)
    configs = [Truth("plain", repeat_offsets=offsets), Truth("noop", fails="broken")]
    hosts = [host_of("a", 0, 2), host_of("b", 3, 1)]
    write_run(tmp_path, configs, repeats=4, hosts=hosts)
    report(tmp_path, tmp_path)
    hosts = read_document(tmp_path / "per_config.json", PerConfig).hosts
    assert list(hosts) == ["a", "b"]
    assert hosts["b"].repeats == [1, 3]
    assert hosts["b"].cpu_model == "CPU of b"
    assert hosts["a"].send_lag_p99_ms == 0.5
    assert (hosts["a"].servers, hosts["a"].servers_that_count) == (4, 2)
    levels = {name: host.p50_us["plain"]["schedule"] for name, host in hosts.items()}
    assert levels["b"] - levels["a"] == pytest.approx(SLOWER_US, rel=0.1)
    assert "| `b` | CPU of b | 1, 3 | 4 | 2 |" in (tmp_path / "SUMMARY.md").read_text()
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
    assert {host.host: host.repeats for host in run.hosts} == {"a": [2], "b": [1, 0]}
