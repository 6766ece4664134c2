# SPDX-License-Identifier: Apache-2.0
"""What the reference study says of its trace, and how another trace compares.

The study is unpublished: two hours of a coding service in production. These figures are
all that is known of its trace; fleet.trace.twin makes one that has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleet.trace.stats import Stats


class Figure(NamedTuple):
    """A figure of the study, and where it is in the statistics of a trace."""

    name: str
    value: float
    of: Callable[[Stats], float | None]
    unit: str = ""


FIGURES = (
    Figure("requests", 2_114_220, lambda stats: stats.requests),
    Figure("duration", 7_200, lambda stats: stats.duration_s, " s"),
    Figure("input tokens, mean", 33_600, lambda stats: stats.input_tokens.mean),
    Figure("input tokens, p50", 20_000, lambda stats: stats.input_tokens.p50),
    Figure("input tokens, p90", 88_000, lambda stats: stats.input_tokens.p90),
    Figure("output tokens, mean", 445, lambda stats: stats.output_tokens.mean),
    Figure("output tokens, p50", 80, lambda stats: stats.output_tokens.p50),
    Figure("input tokens per output token", 75.6, lambda stats: stats.io_ratio),
    Figure("prefill share", 98, lambda stats: 100 * stats.prefill_share, " %"),
    Figure(
        "of the reusable blocks, in the session",
        91,
        lambda stats: 100 * (stats.intra_session_share_of_reuse or 0),
        " %",
    ),
    Figure("APC, infinite cache", 71, lambda stats: 100 * stats.apc_infinite, " %"),
)


def beside_study(stats: Stats) -> str:
    """A table, as Markdown: each figure of the study, the trace's, and the distance."""
    lines = [f"| | study | {stats.source} | off by |", "|---|---:|---:|---:|"]
    for name, value, of, unit in FIGURES:
        found = of(stats)
        if found is None:
            lines.append(f"| {name} | {value:,}{unit} | - | - |")
            continue
        off = 100 * (found / value - 1)
        lines.append(
            f"| {name} | {value:,}{unit} | {_rounded(found)}{unit} | {off:+.1f} % |"
        )
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
