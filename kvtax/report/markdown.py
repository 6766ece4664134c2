# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as Markdown; what was not measured is a dash, never a zero."""

from __future__ import annotations

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import Quantiles

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for prose and tables; a dash where nothing was measured."""
    return DASH if value is None else f"{value:,.{digits}f}"


def interval(estimate: Estimate | None, digits: int = 1) -> str:
    """`value [low, high]`; `value [?]` without an interval."""
    return DASH if estimate is None else f"{estimate:+,.{digits}f}"


def spread(quantiles: Quantiles | None, digits: int = 1) -> str:
    """`p50/p90/p99`; a dash where nothing was measured."""
    if quantiles is None:
        return DASH
    points = (quantiles.p50, quantiles.p90, quantiles.p99)
    return "/".join(number(point, digits) for point in points)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Make a Markdown table, first column left, the others right."""
    align = ["---"] + ["---:"] * (len(head) - 1)
    lines = [head, align, *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
