# SPDX-License-Identifier: Apache-2.0
"""Runs the suite two tests at a time: python -m tests [pytest's options].

BEHIND computes, or starts real engines, and its deadlines are long. It runs at low
priority beside the tests that watch the clock. ALONE follows, as it wants the whole
machine. What neither names is in front, so no test is left out. pytest alone runs the
same tests, one after the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.serving.supervise import exit_on_signals

BEHIND = [
    "tests/blockpatch",
    "tests/patched",
    "tests/patches",
    "tests/e2e",
    "tests/fleet/analyze",
    "tests/microbench/test_before_after.py",
    "tests/microbench/test_report.py",
    "tests/microbench/test_report_refusals.py",
    "tests/microbench/test_roles.py",
    "tests/test_patched.py",
]
ALONE = ["tests/e2e/test_main_job.py"]
FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main() -> int:
    """1 if a test failed, or if pytest itself did; the last line sums up."""
    exit_on_signals()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        statuses = run_all(folder, sys.argv[1:])
        print_sum(folder, time.monotonic() - begun_s)
    return int(any(status not in FINE for status in statuses))


def run_all(folder: Path, options: list[str]) -> list[int]:
    """Exit statuses of the three pytest; each leaves its report in `folder`."""
    not_alone = [f"--ignore={path}" for path in ALONE]
    front = [*not_alone, *(f"--ignore={path}" for path in BEHIND)]
    output = folder / "behind.txt"
    with output.open("w") as log:
        command = ["nice", *pytest_command(folder / "behind.xml", options)]
        command += [*not_alone, *BEHIND]
        behind = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        statuses = [run(folder / "front.xml", options, front)]
        statuses.append(behind.wait())
    finally:
        behind.terminate()
        behind.wait()
        print(output.read_text(), flush=True)
    return [*statuses, run(folder / "alone.xml", options, ALONE)]


def run(report: Path, options: list[str], which: list[str]) -> int:
    return subprocess.run(
        [*pytest_command(report, options), *which], cwd=REPOSITORY, check=False
    ).returncode


def pytest_command(report: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", f"--junit-xml={report}", *options]


def print_sum(folder: Path, taken_s: float) -> None:
    """What failed, then a line such as pytest's own."""
    counts = Counter()
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            ended = [part.tag for part in case if part.tag in OUTCOMES] or ["passed"]
            counts[OUTCOMES.get(ended[0], "passed")] += 1
            if ended[0] in ("failure", "error"):
                print(f"FAILED {case.get('classname')}::{case.get('name')}")
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    duration = timedelta(seconds=round(taken_s))
    print(f" {text} in {taken_s:.2f}s ({duration}) ".center(80, "="))


OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


if __name__ == "__main__":
    sys.exit(main())
