# SPDX-License-Identifier: Apache-2.0
"""Another Python is asked what it has, and keeps every byte."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.serving.errors import ServerError
from lab.serving.installation import installation


@pytest.fixture
def foreign(tmp_path) -> Path:
    """An environment elsewhere, with one package."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = venv / "lib" / version / "site-packages"
    (packages / "Some_Package-1.2.3.dist-info").mkdir(parents=True)
    metadata = packages / "Some_Package-1.2.3.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.2.3\n")
    (packages / "~roken-1.0.dist-info").mkdir()
    (packages / "some_package").mkdir()
    (packages / "some_package" / "__init__.py").write_text("raise SystemExit(9)\n")
    return venv


def test_it_tells_what_it_has_and_where(foreign):
    found = installation(str(foreign / "bin" / "python"))
    assert found.prefix == str(foreign)
    assert found.versions["some-package"] == "1.2.3"
    assert found.package("some_package").parent.name == "site-packages"
    with pytest.raises(ModuleNotFoundError, match="no_such is not installed in /"):
        found.package("no_such")


def test_asking_it_changes_nothing_there(foreign):
    before = {path: path.lstat().st_mtime_ns for path in foreign.rglob("*")}
    found = installation(str(foreign / "bin" / "python"))
    found.package("some_package")
    assert {path: path.lstat().st_mtime_ns for path in foreign.rglob("*")} == before


def test_only_our_own_may_keep_bytecode(foreign):
    found = installation(str(foreign / "bin" / "python"))
    assert found.command("-c", "pass")[1:] == ["-B", "-c", "pass"]
    assert installation().command("-c", "pass") == [sys.executable, "-c", "pass"]


def test_what_is_first_on_our_path_is_not_taken_for_installed(foreign, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with pytest.raises(ModuleNotFoundError):
        installation(str(foreign / "bin" / "python")).package("lab")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/no/such/python", "/no/such/python cannot be run: No such file"),
        ("true", "true is not a Python: it does not answer"),
        ("false", "false is not a Python: .*exit status 1"),
    ],
)
def test_what_is_no_python_is_refused_by_name(python, why):
    with pytest.raises(ServerError, match=why):
        installation(python)
