# SPDX-License-Identifier: Apache-2.0
"""A committed input that changed after its result was made is named, and only that."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import inputs


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    _git(tmp_path, "init", "-q")
    (tmp_path / "traces").mkdir()
    for name in ("data.json", "traces/a", "traces/b", "page.md"):
        (tmp_path / name).write_text(name)
    _git(tmp_path, "add", ".")
    inputs.note("page.md", ["data.json", "traces"], tmp_path)
    _commit(tmp_path)
    return tmp_path


def _git(repository: Path, *arguments: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(repository), *who, *arguments], check=True)


def _commit(repository: Path) -> None:
    _git(repository, "add", "-A")
    _git(repository, "commit", "-qm", "m")


def test_a_result_of_the_committed_inputs_is_not_stale(repository):
    assert inputs.stale(repository) == []


def test_a_change_counts_once_it_is_committed(repository):
    (repository / "data.json").write_text("other")
    assert inputs.stale(repository) == []
    _commit(repository)
    (line,) = inputs.stale(repository)
    assert "page.md" in line and "data.json" in line
    inputs.note("page.md", ["data.json", "traces"], repository)
    _commit(repository)
    assert inputs.stale(repository) == []


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed"])
def test_any_change_below_a_folder_counts(repository, change):
    folder = repository / "traces"
    if change == "edited":
        (folder / "a").write_text("b")
    elif change == "added":
        (folder / "c").write_text("c")
    elif change == "removed":
        (folder / "a").unlink()
    else:
        (folder / "a").rename(folder / "d")
    _commit(repository)
    (line,) = inputs.stale(repository)
    assert "traces" in line


def test_an_input_that_is_gone_is_named(repository):
    (repository / "data.json").unlink()
    _commit(repository)
    (line,) = inputs.stale(repository)
    assert "data.json" in line and "not committed" in line


def test_results_in_virtual_time_are_checked_too(repository):
    (repository / "fleet").mkdir()
    digest = inputs.digest_here("data.json", repository)
    (repository / "fleet" / "results.lock").write_text(
        f'[wide]\ncommit = "c"\n[wide.inputs]\n"data.json" = "{digest}"\n'
    )
    _commit(repository)
    assert inputs.stale(repository) == []
    (repository / "data.json").write_text("other")
    _commit(repository)
    assert any(line.startswith("wide:") for line in inputs.stale(repository))


def test_what_git_does_not_have_cannot_be_noted(repository):
    (repository / "new.json").write_text("n")
    with pytest.raises(inputs.InputsError, match="git add"):
        inputs.note("page.md", ["new.json"], repository)
