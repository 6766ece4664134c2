# SPDX-License-Identifier: Apache-2.0
"""What a CI system reads of a gate: JUnit XML, one test case per limit."""

from __future__ import annotations

from xml.etree import ElementTree

from lab.stats.checks import Check, sentence


def junit(checks: list[Check]) -> bytes:
    """A limit that fails is a failure; one that is undecided and passes, a skip."""
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
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"
