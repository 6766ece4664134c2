# SPDX-License-Identifier: Apache-2.0
"""Render a comparison of two sweeps or two gates as Markdown."""

from __future__ import annotations

from kvtax.records.estimate import Estimate
from kvtax.report.markdown import DASH, table
from kvtax.verdict.bounds import Check, headline
from kvtax.verdict.changes import Change, Comparison

NOTE = (
    "**Bold**: a changed verdict, or a cost that certainly changed: the interval of "
    "the difference leaves out 0, and all intervals of the table hold at once."
)


def markdown(comparison: Comparison) -> str:
    """Render the outcome, the doubts, the limits and the changes."""
    facts = [
        [fact, *(str(value) for value in values)]
        for fact, values in comparison.facts.items()
    ]
    sections = [
        f"# {headline(comparison.checks)}",
        table(["", "OLD", "NEW"], facts),
        *_listed("Read this first", comparison.cautions),
        *_open(comparison.checks),
        "## What changed",
        _verdicts(comparison),
        _changes(comparison),
        NOTE,
        f"<details><summary>All limits</summary>\n\n{_checks(comparison.checks)}\n\n"
        "</details>",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _open(checks: list[Check]) -> list[str]:
    """Return the sections of broken and of undecided limits."""
    parts = []
    for outcome in ("broken", "undecided"):
        # A line for all configs with the same outcome.
        alike: dict[tuple[str, str, str, bool], list[str]] = {}
        for check in checks:
            if check.outcome == outcome:
                key = check.what, check.value, check.bound, check.fails
                alike.setdefault(key, []).append(f"`{check.config}`")
        lines = [
            f"{', '.join(configs)}: {what} is {value}; limit: {bound}"
            + (" (**fails**)" if fails and outcome == "undecided" else "")
            for (what, value, bound, fails), configs in alike.items()
        ]
        parts += _listed(outcome.capitalize(), lines)
    return parts


def _checks(checks: list[Check]) -> str:
    rows = [
        [f"`{check.config}`", check.what, check.bound, check.value, check.outcome]
        for check in checks
    ]
    return table(["config", "what", "limit", "NEW", ""], rows)


def _verdicts(comparison: Comparison) -> str:
    lines = [
        f"- `{name}`: **{before} \N{RIGHTWARDS ARROW} {after}**"
        for name, (before, after) in comparison.verdicts.items()
        if before != after
    ]
    return "\n".join(lines)


def _changes(comparison: Comparison) -> str:
    rows = [
        [
            f"`{change.subject}`",
            change.cost,
            _estimate(change.old),
            _estimate(change.new),
            _difference(change),
        ]
        for change in comparison.changes
        if change.old is not None or change.new is not None
    ]
    return table(["", comparison.unit, "OLD", "NEW", "change"], rows)


def _difference(change: Change) -> str:
    text = _estimate(change.difference)
    return f"**{text}**" if change.changed else text


def _estimate(estimate: Estimate | None) -> str:
    return DASH if estimate is None else f"{estimate:+,.1f}"
