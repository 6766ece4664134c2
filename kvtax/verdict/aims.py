# SPDX-License-Identifier: Apache-2.0
"""Aims and limits: whether a measurement meets them, in Markdown and as JUnit XML.

An aim is met if the whole 95 % interval is within its bound, missed if all of it is
outside. A limit of a gate is judged alike: kept, broken, or undecided in between and
without a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

import msgspec

from kvtax.records.estimate import Estimate, HasInterval
from kvtax.report.markdown import table

Judgement = Literal["met", "missed", "undecided"]

Outcome = Literal["kept", "undecided", "broken"]
OUTCOMES: dict[Judgement, Outcome] = {
    "met": "kept",
    "undecided": "undecided",
    "missed": "broken",
}


class Aim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most or the least that something is meant to be.

    what: what is measured, such as "get_finished p50".
    at_most, at_least: the bound, which is within the aim; exactly one is given.
    unit: of the bound: "us", or "x no-op" for a ratio; empty for a plain number.
    whose: who set the aim, such as "ours" or "the vLLM RFC's".

    Raises ValueError unless there is exactly one bound; read from a file by msgspec
    it is a ValidationError.
    """

    what: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""
    whose: str = "ours"

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("an aim has either at_most or at_least")

    @property
    def bound(self) -> str:
        """`at most 3 us`."""
        if self.at_most is not None:
            return f"at most {self.at_most:.4g} {self.unit}".rstrip()
        return f"at least {self.at_least:.4g} {self.unit}".rstrip()

    def __str__(self) -> str:
        """`engine hooks: at most 3 us (ours)`."""
        return f"{self.what}: {self.bound} ({self.whose})"


def judge(estimate: HasInterval, aim: Aim) -> Judgement:
    """Met if the whole 95 % interval is within the aim, missed if all of it is not."""
    low, high = estimate.ci95 or (math.nan, math.nan)
    at_most, at_least = aim.at_most, aim.at_least
    within = at_most is None or high <= at_most
    within &= at_least is None or low >= at_least
    outside = at_most is not None and low > at_most
    outside |= at_least is not None and high < at_least
    if within:
        return "met"
    return "missed" if outside else "undecided"


def aims_table(found: Iterable[tuple[Aim, Estimate]], spec: str) -> str:
    """Make a Markdown table; `spec` formats the numbers found, such as `.1f`."""
    rows = [
        [aim.what, aim.bound, aim.whose, f"{interval:{spec}}", judge(interval, aim)]
        for aim, interval in found
    ]
    return table(["what", "aim", "whose", "found", ""], rows)


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
    return f"{check.config}: {check.what} is {check.found}; limit: {check.bound}"


def junit(checks: list[Check]) -> bytes:
    """Write JUnit XML: a failing limit is a failure, an undecided one a skip."""
    failed = sum(check.fails for check in checks)
    skipped = sum(check.outcome == "undecided" and not check.fails for check in checks)
    counts = {"tests": len(checks), "failures": failed, "skipped": skipped}
    suite = ElementTree.Element(
        "testsuite",
        {"name": "kvtax", "errors": "0"} | {k: str(n) for k, n in counts.items()},
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"kvtax.{check.config}", name=check.what
        )
        if check.fails or check.outcome == "undecided":
            kind = "failure" if check.fails else "skipped"
            said = f"{check.outcome}: {sentence(check)}"
            ElementTree.SubElement(case, kind, message=said)
    ElementTree.indent(suite)
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text + b"\n"
