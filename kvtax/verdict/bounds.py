# SPDX-License-Identifier: Apache-2.0
"""Limits on costs: whether a measurement keeps them, in words and as JUnit XML.

A limit is kept if the whole 95 % interval is within its bound, broken if all of it is
beyond, and undecided in between and without a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from kvtax.records.estimate import Estimate
from kvtax.report.render import visible

Outcome = Literal["kept", "undecided", "broken"]


@dataclass(frozen=True)
class Bound:
    """The most that something may cost: `what`, in `unit`."""

    what: str
    at_most: float
    unit: str = ""

    def __str__(self) -> str:
        """`at most 3 us`."""
        return f"at most {self.at_most:.4g} {self.unit}".rstrip()


def judge(estimate: Estimate, bound: Bound) -> Outcome:
    """Judge an estimate by its interval; without one it is undecided."""
    if estimate.high <= bound.at_most:
        return "kept"
    return "broken" if estimate.low > bound.at_most else "undecided"


@dataclass(frozen=True)
class Check:
    """Outcome of one limit on one config. `fails` says whether it ends the gate."""

    config: str
    what: str
    bound: str
    value: str
    outcome: Outcome
    fails: bool


@dataclass(frozen=True)
class Checker:
    """Makes the checks of one config; an undecided limit fails if `strict`."""

    config: str
    strict: bool = False

    def check(self, what: str, bound: str, value: str, outcome: Outcome) -> Check:
        """Make a check from its outcome."""
        fails = outcome == "broken" or (outcome == "undecided" and self.strict)
        return Check(self.config, what, bound, value, outcome, fails)

    def judged(self, bound: Bound, estimate: Estimate | None) -> Check:
        """Judge an estimate; None is no number."""
        if estimate is None:
            return self.check(bound.what, str(bound), "not measured", "undecided")
        value = f"{estimate:,.3g}"
        return self.check(bound.what, str(bound), value, judge(estimate, bound))


def headline(checks: list[Check]) -> str:
    """`Cost gate: failed. 1 of 14 limits broken, 2 undecided`."""
    if not checks:
        return "Cost gate: no limits given"
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
    return f"{check.config}: {check.what} is {check.value}; limit: {check.bound}"


def junit(checks: list[Check]) -> bytes:
    """Write JUnit XML: a failing limit is a failure, an undecided one a skip.

    A control sign in a name is written as an escape, as XML has none.
    """
    failed = sum(check.fails for check in checks)
    skipped = sum(check.outcome == "undecided" and not check.fails for check in checks)
    counts = {"tests": len(checks), "failures": failed, "skipped": skipped}
    suite = ElementTree.Element(
        "testsuite",
        {"name": "kvtax", "errors": "0"} | {k: str(n) for k, n in counts.items()},
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"kvtax.{visible(check.config)}",
            name=visible(check.what),
        )
        if check.fails or check.outcome == "undecided":
            kind = "failure" if check.fails else "skipped"
            message = visible(f"{check.outcome}: {sentence(check)}")
            ElementTree.SubElement(case, kind, message=message)
    ElementTree.indent(suite)
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text + b"\n"
