# SPDX-License-Identifier: Apache-2.0
"""Studies start by name, and a short one gives its result."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtax.paths import REPOSITORY
from studies.harness import STUDIES

NAMES = sorted(file.parent.name for file in STUDIES.glob("*/__main__.py"))


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_study_describes_itself_and_is_documented(name):
    done = run(f"studies.{name}", "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m studies.{name}" in done.stdout
    page = (STUDIES / name / "README.md").read_text()
    assert f"python -m studies.{name}" in page
    assert f"[{name}]({name}/README.md)" in (STUDIES / "README.md").read_text()


@pytest.mark.slow
def test_a_missing_run_is_an_error_that_names_it(tmp_path):
    done = run("studies.reference_study", "--sample", str(tmp_path))
    assert done.returncode == 2
    assert "give a finished run of" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_abort_says_what_a_vllm_survives_as_it_is(tmp_path):
    names = "nothing_fails", "aborted_before_scheduled"
    chosen = [part for name in names for part in ("--scenario", name)]
    options = [*chosen, "--patience", "5", "--out", str(tmp_path / "abort.md")]
    done = run("studies.abort", "--vllm", "0.18.1", *options)
    assert done.returncode == 1, done.stderr
    assert "vLLM 0.18.1 as it is: 1 of 2 passed." in done.stdout
    assert "| nothing fails | passed |" in done.stdout
    assert "| aborted before scheduled | failed |" in done.stdout
