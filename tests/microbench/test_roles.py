# SPDX-License-Identifier: Apache-2.0
"""What a config is to a report stands in its TOML and in run.json, never in code."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtax.cli import main
from kvtax.engine.connector import connector_names, load_connector
from kvtax.records.run import Role
from kvtax.verdict.roles import ExpectedVerdict
from microbench.profile import load_profile
from tests.microbench.synthetic import (
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
    assert (plain.split()[:2], walk.split()[:2]) == (
        ["plain", "flat"],
        ["walk", "grows"],
    )
