# SPDX-License-Identifier: Apache-2.0
"""What became of each test of a pytest run, and how two runs differ."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

# Outcome of each test by its node id; a file that pytest could not import counts as
# one test, with its path as id.
Outcomes = dict[str, str]


def read_outcomes(report: Path) -> Outcomes:
    """Outcomes in a file of pytest-reportlog: passed, failed, skipped or error."""
    found: Outcomes = {}
    if not report.exists():
        return found
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        kind, name = entry["$report_type"], entry.get("nodeid")
        outcome = entry.get("outcome")
        if kind == "CollectReport" and outcome == "failed":
            found[name] = "error"
        elif kind == "TestReport" and entry["when"] == "call":
            found[name] = outcome
        elif kind == "TestReport" and outcome != "passed":
            # Before the test or after it; a skip is decided before.
            found[name] = "skipped" if outcome == "skipped" else "error"
    return found


def differences(before: Outcomes, after: Outcomes) -> list[str]:
    """Tests of `before` that came out otherwise in `after`, a line each."""
    return [
        f"{name}: {outcome} before, {after.get(name, 'gone')} after"
        for name, outcome in sorted(before.items())
        if after.get(name) != outcome
    ]


def counted(outcomes: Outcomes) -> str:
    """`3 passed, 1 failed`, the most frequent first."""
    counts = Counter(outcomes.values()).most_common()
    return ", ".join(f"{number} {outcome}" for outcome, number in counts) or "no test"
