# SPDX-License-Identifier: Apache-2.0
"""Runs the suite two tests at a time: python -m tests [pytest's options, no paths].

BEHIND starts real engines, or computes, and its deadlines are long. It runs at low
priority beside the others, of which many watch the clock. ALONE follows, as it wants
the whole machine. What neither names is in front, so no test is left out. pytest alone
runs the same tests, one after the other.
"""

from __future__ import annotations

import signal
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
    "tests/patched",
    "tests/e2e",
    "tests/fleet/virtual",
    "tests/lab/test_stats.py",
    "tests/test_patched.py",
]
# Two of them measure: of two measurements at once, one is refused. The third says how
# late many threads may be, and beside tests that burn a core they are later.
ALONE = [
    "tests/e2e/test_main_job.py",
    "tests/e2e/test_observatory.py",
    "tests/patched/test_short_circuit.py",
]
FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
# For a pytest that is interrupted: its fixtures stop real servers.
STOP_GRACE_S = 60.0


def main() -> int:
    """0 if there were tests and all parts went well, else 1; the last line sums up."""
    options = sys.argv[1:]
    if paths := [one for one in options if Path(one.partition("::")[0]).exists()]:
        print(f"tests: {paths[0]} is a path: run it with python -m pytest")
        return 1
    exit_on_signals()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        statuses = run_all(folder, options)
        reports = {part: cases(folder / f"{part}.xml") for part in statuses}
    print_sum(statuses, reports, time.monotonic() - begun_s)
    if None in reports.values() or not any(reports.values()):
        return 1
    return int(any(status not in FINE for status in statuses.values()))


def run_all(folder: Path, options: list[str]) -> dict[str, int]:
    """The exit status of each part, which leaves its report in `folder`."""
    not_alone = [f"--ignore={path}" for path in ALONE]
    in_front = [*not_alone, *(f"--ignore={path}" for path in BEHIND)]
    output = folder / "behind.txt"
    running: list[subprocess.Popen] = []

    def start(part: str, which: list[str], **how) -> subprocess.Popen:
        command = [sys.executable, "-m", "pytest", f"--junit-xml={folder / part}.xml"]
        nice = ["nice"] if part == "behind" else []
        # A group of its own: Ctrl-C comes to us, who then interrupt each part once.
        running.append(
            subprocess.Popen(
                [*nice, *command, *options, *which],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                process_group=0,
                **how,
            )
        )
        return running[-1]

    try:
        with output.open("wb") as log:
            behind = start("behind", [*not_alone, *BEHIND], stdout=log, stderr=log)
        statuses = {"front": start("front", in_front).wait()}
        statuses["behind"] = behind.wait()
        print(output.read_text(errors="replace"), flush=True)
        return statuses | {"alone": start("alone", ALONE).wait()}
    finally:
        stop(running)


def stop(parts: list[subprocess.Popen]) -> None:
    """Interrupt those that still run, as Ctrl-C does: they clean up."""
    left = [part for part in parts if part.poll() is None]
    for part in left:
        part.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + STOP_GRACE_S
    for part in left:
        try:
            part.wait(max(deadline_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            part.kill()


def cases(report: Path) -> list[ElementTree.Element] | None:
    """The tests that pytest reported; None if it ended without its report."""
    try:
        return list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        return None


def print_sum(statuses: dict[str, int], reports: dict, taken_s: float) -> None:
    """What failed, then a line such as pytest's own."""
    counts = Counter()
    for part, status in statuses.items():
        told = reports[part]
        if told is None or status not in (*FINE, pytest.ExitCode.TESTS_FAILED):
            how = "" if told is not None else ", without its report"
            print(f"FAILED the part {part}: pytest ended with status {status}{how}")
        for case in told or []:
            ended = [inner.tag for inner in case if inner.tag in OUTCOMES] or ["passed"]
            counts[OUTCOMES.get(ended[0], "passed")] += 1
            if ended[0] in ("failure", "error"):
                print(f"FAILED {case.get('classname')}::{case.get('name')}")
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    duration = timedelta(seconds=round(taken_s))
    print(f" {text or 'no tests'} in {taken_s:.2f}s ({duration}) ".center(80, "="))


if __name__ == "__main__":
    sys.exit(main())
