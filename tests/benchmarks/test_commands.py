# SPDX-License-Identifier: Apache-2.0
"""Benchmarks start by name, and the short ones give their results."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys

import pytest

from benchmarks.command import BENCHMARKS
from benchmarks.results import NotMeasured
from kvtax.cli import Exit, main
from kvtax.paths import REPOSITORY

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str) -> str:
    """Return the output of `kvtax bench name`."""
    command = [sys.executable, "-m", "kvtax", "bench", name, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda of: of.name)
def test_each_benchmark_describes_itself_and_is_documented(benchmark):
    module = importlib.import_module(benchmark.module)
    parser = argparse.ArgumentParser()
    module.configure(parser)
    assert module.__doc__ and callable(module.run)
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert f"kvtax bench {benchmark.name}" in text


def test_the_list_has_a_line_per_benchmark():
    done = [sys.executable, "-m", "kvtax", "bench"]
    text = subprocess.run(done, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in text.splitlines()] == [
        benchmark.name for benchmark in BENCHMARKS
    ]


def test_only_errors_with_an_exit_code_end_a_benchmark_with_one(monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr("benchmarks.look.run", fail)
    error = NotMeasured("two cores are needed")
    assert main(["bench", "look"]) == Exit.NOT_MEASURED
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bench", "look"])


def test_a_small_fleet_is_looked_at_twice():
    text = run("look", "--steps", "9000", "--servers", "3")
    for look in ("first, of JSON", "second, of what the first kept"):
        assert f"| {look} |" in text
    assert "The page has 0." in text


def test_what_three_hosts_count_is_what_one_would():
    text = run("look", "--hosts", "3", "--steps", "9000", "--servers", "3")
    assert "Counts of merged and whole are equal." in text
    _, _, table = text.partition("% off |")
    off = [float(row) for row in re.findall(r"\| ([\d.]+)% \|", table)]
    assert len(off) > 2 and max(off) <= 1.0


def test_small_traces_are_made_described_and_sampled():
    text = run("traces", "--sessions", "30")
    for name in ("synth", "stats", "sample of 300 requests", "512"):
        assert f"| {name} |" in text
