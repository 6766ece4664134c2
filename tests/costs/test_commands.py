# SPDX-License-Identifier: Apache-2.0
"""Every cost can be started, and the ones that take seconds do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lab.paths import REPOSITORY

pytestmark = pytest.mark.slow
COMMANDS = sorted(
    ".".join(file.parent.relative_to(REPOSITORY).parts)
    for file in (REPOSITORY / "costs").rglob("__main__.py")
)


def run(module: str, *arguments: str) -> str:
    """What `python -m module` prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", COMMANDS)
def test_a_cost_says_what_it_measures(module):
    assert run(module, "--help").startswith(f"usage: python -m {module} ")


@pytest.mark.parametrize("module", COMMANDS)
def test_a_cost_has_a_readme_that_names_its_command_and_a_make_target(module):
    folder = REPOSITORY / module.replace(".", "/")
    pages = [folder / "README.md", folder.parent / "README.md"]
    text = "".join(page.read_text() for page in pages if page.exists())
    assert f"python -m {module}" in text
    assert f"-m {module}" in (REPOSITORY / "Makefile").read_text()


def test_a_small_report_is_analysed_within_its_promise():
    taken = json.loads(run("costs.report", "--records", "20000"))
    assert 15_000 < taken["decode_only_steps"] < 20_000
    # One server: its slope is known, and not what servers differ by.
    assert taken["slope"]["value"] != 0 and taken["slope"]["ci95"] is None
    assert 0 < taken["load_s"] < taken["all_s"]


def test_a_small_fleet_is_looked_at_twice():
    text = run("costs.look", "--steps", "9000", "--servers", "3")
    for look in ("first, of JSON", "second, of what the first kept"):
        assert f"| {look} |" in text
    assert "The page has 0." in text


def test_what_three_hosts_count_is_what_one_would():
    text = run("costs.look.merged", "--steps", "9000", "--servers", "3")
    assert "Counts of merged and whole are equal." in text
    _, _, table = text.partition("% off |")
    off = [float(row) for row in re.findall(r"\| ([\d.]+)% \|", table)]
    assert len(off) > 2 and max(off) <= 1.0


def test_small_traces_are_made_described_and_sampled():
    text = run("costs.traces", "--sessions", "30")
    for name in ("synth", "stats", "sample of 300 requests", "512"):
        assert f"| {name} |" in text
