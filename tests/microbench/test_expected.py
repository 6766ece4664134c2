# SPDX-License-Identifier: Apache-2.0
"""A config whose true cost is known must get the verdict that its TOML names."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from synthetic import Truth, page_of, write_run

from lab.paths import CONFIGS
from lab.records.roles import Role
from microbench import sweep
from microbench.analysis.expected import Outcome
from microbench.profile import load_profile

KNOWN = "Configs whose verdict is known"


def run_all(folder, monkeypatch, expected: dict[str, str]) -> int:
    """The exit status of a sweep in which `walk` grows and `plain` is flat."""

    def made_up(run_dir, *_):
        write_run(run_dir, [Truth("plain"), Truth("walk", slope=40.0)], configs=roles)
        return []

    roles = {name: Role(expected=verdict) for name, verdict in expected.items()}
    monkeypatch.setattr(sweep, "sweep", made_up)
    # Nothing is measured, so somebody else may be measuring.
    monkeypatch.setattr(sweep, "machine_lock", nullcontext)
    monkeypatch.setattr("sys.argv", ["run_all.sh", "--out", str(folder)])
    return sweep.main()


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
    assert Outcome("some", expected, found).kind == kind


def test_the_profile_measures_every_connector_with_a_known_cost():
    known = {f"liars/{file.stem}" for file in (CONFIGS / "connectors/liars").iterdir()}
    configs = load_profile("liars").configs
    assert known <= set(configs)
    assert len(configs) == len(set(configs))
