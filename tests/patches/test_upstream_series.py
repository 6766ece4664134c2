# SPDX-License-Identifier: Apache-2.0
"""The series for upstream: it applies, and it is the patches of this repository."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from kvtax.paths import REPOSITORY
from tools.upstream.check import chosen_tests, counts, differences, judge, read_outcomes
from tools.upstream.evidence import PAGE, RESULTS, page_with_results
from tools.upstream.release import (
    PART,
    Release,
    Repository,
    UpstreamError,
    load_releases,
)
from tools.upstream.series import patched_code
from tools.upstream.threads import old_threads

pytestmark = pytest.mark.slow

RELEASES = load_releases()


class Series(NamedTuple):
    """A release's series, applied."""

    release: Release
    repository: Repository
    commits: list[str]


@pytest.fixture(scope="module", params=RELEASES)
def series(request, tmp_path_factory) -> Series:
    release = RELEASES[request.param]
    try:
        repository = Repository(release, tmp_path_factory.mktemp("vllm"), PART)
    except UpstreamError as error:
        pytest.skip(str(error))
    repository.apply(release.series)
    commits = repository.git("rev-list", "--reverse", "base..series").split()
    return Series(release, repository, commits)


def test_the_series_applies_to_the_pristine_release(series):
    assert len(series.commits) > 0
    assert series.repository.git("status", "--porcelain") == ""


def test_each_commit_is_what_its_patch_makes_of_the_release(series, tmp_path):
    assert len(series.commits) == len(series.release.sources)
    for number, commit in enumerate(series.commits):
        names = list(series.release.sources[: number + 1])
        code = patched_code(series.release, names, tmp_path / str(number))
        git = series.repository.git
        changed = git("diff", "--name-only", "base", commit, "--", "vllm").split()
        assert set(changed) == set(code), names
        for path, content in code.items():
            assert git("show", f"{commit}:{path}").encode() == content, (
                f"{path} has drifted: run make upstream-series"
            )


def test_each_commit_brings_tests(series):
    for commit in series.commits:
        git = series.repository.git
        assert git("diff", "--name-only", f"{commit}~", commit, "--", "tests"), commit


def test_nobody_has_signed_off_yet(series):
    assert "Signed-off-by" not in series.release.series.read_text()


def test_the_series_keeps_the_releases_own_style(series):
    if series.release.version != max(RELEASES, key=_numbers):
        pytest.skip("only the newest release is for upstream's linters")
    files = series.repository.changed("vllm") + series.repository.changed("tests")
    # Most of vllm is not there for ruff to see that it is no third party's.
    ours = ["--config", "lint.isort.known-first-party = ['tests', 'vllm']"]

    def ruff(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "ruff", *command, *ours],
            cwd=series.repository.root,
            capture_output=True,
            text=True,
        )

    checked = ruff("check", *files)
    assert checked.returncode == 0, checked.stdout
    git = series.repository.git
    git("checkout", "-q", "base")
    try:
        # Our ruff wants some files of the release itself otherwise.
        unformatted = [
            file
            for file in files
            if (series.repository.root / file).exists()
            and ruff("format", "--diff", file).returncode
        ]
    finally:
        git("checkout", "-q", "series")
    formatted = ruff("format", "--diff", *(set(files) - set(unformatted)))
    assert formatted.returncode == 0, formatted.stdout


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_each_commit_is_described_in_the_order_of_the_series():
    text = (REPOSITORY / "patches" / "upstream" / "README.md").read_text()
    described = [
        line.removeprefix("## ") for line in text.splitlines() if line[:3] == "## "
    ]
    assert described == list(RELEASES["0.33.0"].sources)
    for release in RELEASES.values():
        kept = set(release.sources)
        assert [name for name in described if name in kept] == list(release.sources)


def test_a_commit_alone_runs_the_tests_that_it_adds_or_changes(series):
    for name, commit in zip(series.release.sources, series.commits, strict=True):
        tests = series.repository.own_tests(commit)
        git = series.repository.git
        changed = git("diff", "--name-only", f"{commit}~", commit, "--", "tests")
        assert {test.split("::")[0] for test in tests} == set(changed.split()), name


def test_a_commit_is_counted_with_the_files_that_it_changes(series):
    tests = list(series.release.tests)
    for name, commit in zip(series.release.sources, series.commits, strict=True):
        own = {test.split("::")[0] for test in series.repository.own_tests(commit)}
        beside = series.repository.tests_of_changed(commit, tests)
        assert own & set(tests) <= set(beside) < set(tests), name


def test_only_tests_of_what_changed_are_chosen_if_told_to(series):
    release, repository, commits = series
    assert chosen_tests(*series, changed=False) == list(release.tests)
    chosen = chosen_tests(*series, changed=True)
    assert chosen == [test for test in release.tests if test in chosen]
    for commit in commits:
        beside = repository.tests_of_changed(commit, release.tests)
        assert set(beside) <= set(chosen) < set(release.tests)


def test_a_commit_applies_alone_unless_it_is_stacked(series):
    git = series.repository.git
    for name, commit in zip(series.release.sources, series.commits, strict=True):
        git("checkout", "-q", "--detach", "base")
        try:
            git("cherry-pick", commit)
            alone = True
        except UpstreamError:
            git("cherry-pick", "--abort")
            alone = False
        finally:
            git("checkout", "-q", "series")
        assert alone == (name not in series.release.stacked), name


def test_a_difference_is_found_whatever_it_is(tmp_path):
    """A test that fails, is gone, or cannot even be collected any more."""
    report = tmp_path / "report.jsonl"
    test = '{"$report_type": "TestReport", "nodeid": "t.py::%s", '
    report.write_text(
        test % "same"
        + '"when": "call", "outcome": "passed"}\n'
        + test % "worse"
        + '"when": "call", "outcome": "failed"}\n'
        + test % "torn"
        + '"when": "call", "outcome": "passed"}\n'
        + test % "torn"
        + '"when": "teardown", "outcome": "failed"}\n'
        + '{"$report_type": "CollectReport", "nodeid": "u.py", "outcome": "failed"}\n'
    )
    after = read_outcomes(report)
    before = {f"t.py::{name}": "passed" for name in ("same", "worse", "torn", "gone")}
    assert differences(before, after) == [
        "t.py::gone: passed before, gone after",
        "t.py::torn: passed before, error after",
        "t.py::worse: passed before, failed after",
    ]
    assert after["u.py"] == "error"


@pytest.mark.parametrize(
    ("after", "without", "wrong"),
    [
        ({"old": "passed", "new": "passed"}, {"new": "failed"}, 0),
        ({"old": "passed", "new": "passed"}, {}, 0),  # could not be imported
        ({"old": "failed", "new": "passed"}, {"new": "failed"}, 1),
        ({"old": "passed", "new": "failed"}, {"new": "failed"}, 1),
        ({"old": "passed", "new": "skipped"}, {"new": "failed"}, 1),
        ({"old": "passed", "new": "passed"}, {"new": "passed"}, 1),
        ({"old": "passed"}, {}, 1),
    ],
)
def test_the_check_objects_to_differences_failures_and_empty_proof(
    after, without, wrong
):
    assert len(judge({"old": "passed"}, after, without)) == wrong


def test_counts_are_of_one_commits_tests_and_of_those_beside():
    before = {"a.py::x": "passed", "a.py::y": "failed", "b.py::z": "passed"}
    after = before | {
        "a.py::y": "passed",
        "a.py::mine[1]": "passed",
        "a.py::other": "passed",
        "new.py::whole": "skipped",
    }
    without = {"a.py::mine[1]": "failed", "new.py::whole": "passed"}
    own, beside = ["a.py::mine", "new.py"], ["a.py"]
    assert counts(own, beside, before, after, without, None) == [
        "1 passed, 1 skipped",
        "needs those before it",
        "1",
        "1 passed, 1 failed",
        "2 passed",
    ]
    alone = counts(own, beside, before, after, without, {"a.py::mine[1]": "passed"})
    assert alone[1] == "1 passed"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Threads, looked up on 2026-01-01, in an index.", [1]),
        ("Threads were looked up on 2026-02-20.", []),
        ("Measured on 2026-01-01.", []),
        ("\n| a | looked up on 2026-01-01 |\n| b | looked up on 2026-02-27 |", [2]),
    ],
)
def test_threads_that_were_looked_up_more_than_60_days_ago_are_named(text, lines):
    today = datetime.date(2026, 3, 3)
    assert [number for number, _ in old_threads(text, today)] == lines


def test_the_descriptions_show_the_committed_evidence():
    page = PAGE.read_text()
    assert page_with_results(page) == page
    results = {file.stem for file in RESULTS.glob("*.json")}
    assert set(re.findall(r"<!--evidence (\w+)-->", page)) <= results
