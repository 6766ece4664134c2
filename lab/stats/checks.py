# SPDX-License-Identifier: Apache-2.0
"""Limits that a gate keeps, and what became of each.

A limit is judged as an aim is (lab/stats/aims.py): kept if the whole 95 % interval is
within it, broken if all of it is outside. In between, or without a number, it is
undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.stats.aims import Judgement

Outcome = Literal["kept", "undecided", "broken"]
OUTCOMES: dict[Judgement, Outcome] = {
    "met": "kept",
    "undecided": "undecided",
    "missed": "broken",
}


@dataclass(frozen=True)
class Check:
    """One limit on one config. `fails` says whether it ends the gate."""

    config: str
    what: str
    bound: str
    found: str
    outcome: Outcome
    fails: bool


def headline(checks: list[Check]) -> str:
    """`Cost gate: failed. 1 of 14 limits broken, 2 undecided`."""
    broken, undecided = (
        sum(check.outcome == outcome for check in checks)
        for outcome in ("broken", "undecided")
    )
    result = "failed" if any(check.fails for check in checks) else "passed"
    return (
        f"Cost gate: {result}. {broken} of {len(checks)} limits broken, "
        f"{undecided} undecided"
    )


def sentence(check: Check) -> str:
    """`noop: verdict is grows; limit: no worse than flat`."""
    return f"{check.config}: {check.what} is {check.found}; limit: {check.bound}"
