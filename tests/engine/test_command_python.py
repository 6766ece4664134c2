# SPDX-License-Identifier: Apache-2.0
"""The Python of a command is found, and the package that it would import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvtax.engine.command_python import python_of
from kvtax.engine.errors import InstallationError

TRAMPOLINE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch) -> Path:
    """A folder on PATH with scripts, and a python whose path has a space."""
    folder = tmp_path / "bin of mine"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    for name, text in {
        "plain": f"#!{sys.executable}\n",
        "by_env": "#!/usr/bin/env python3\n",
        "by_env_s": "#!/usr/bin/env -S python3 -u\n",
        "trampoline": TRAMPOLINE.format(python=folder / "python3"),
        "shell": "#!/bin/bash\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("plain serve", sys.executable),
        ("by_env", "python3"),
        ("by_env_s", "python3"),
        ("trampoline", "python3"),
        ("env X=1 nice -n 5 trampoline serve", "python3"),
        ("python3 -m vllm.entrypoints.openai.api_server", "python3"),
    ],
)
def test_it_is_the_interpreter_that_the_command_starts(scripts, command, expected):
    found = python_of(command.split())
    assert found.python == str(scripts / expected)
    is_module = command.startswith("python3")
    assert found.folder == (os.getcwd() if is_module else str(scripts))


@pytest.mark.parametrize("command", ["shell", "bash -c plain_text", "no-such-program"])
def test_a_command_without_a_python_needs_one_named(scripts, command):
    with pytest.raises(InstallationError, match="--python"):
        python_of(command.split())
    assert python_of(command.split(), "python3").python == str(scripts / "python3")


def test_a_package_in_the_working_directory_is_that_of_a_module_alone(
    scripts, tmp_path, monkeypatch
):
    for place in (tmp_path / "checkout", tmp_path / "site"):
        (place / "demo").mkdir(parents=True)
        (place / "demo" / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path / "checkout")
    as_script = python_of(["plain"]).package("demo")
    as_module = python_of(["python3", "-m", "demo"]).package("demo")
    assert as_script == tmp_path / "site" / "demo"
    assert as_module == tmp_path / "checkout" / "demo"
    with pytest.raises(InstallationError, match="package nothing is not installed"):
        python_of(["plain"]).package("nothing")
