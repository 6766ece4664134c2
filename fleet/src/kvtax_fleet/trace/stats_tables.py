# SPDX-License-Identifier: Apache-2.0
"""Show a trace's statistics as Markdown, alone or beside the reference study's.

Its trace is unpublished: two hours of a coding service in production. FIGURES are what
it first stated of the whole trace; kvtax_fleet.trace.twin makes a trace that has them.
Of these its authors withdrew the share within sessions: it is 62 %. Of a sample of
1,000 requests they state others: kvtax_fleet.trace.study_sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvtax_fleet.trace.stats import TOP_SESSIONS, SessionRow, Spread, Stats

COLUMNS = ("n", "mean", "p50", "p90", "p99", "max")
SESSION_COLUMNS = (
    "turns",
    "input tokens",
    "output tokens",
    "first prompt",
    "longest prompt",
    "growth",
)


def markdown(stats: Stats) -> str:
    """Format the statistics for people."""
    spreads = {
        "input tokens": stats.input_tokens,
        "output tokens": stats.output_tokens,
        "turns per session": stats.turns_per_session,
        "input tokens per session": stats.input_tokens_per_session,
        "output tokens per session": stats.output_tokens_per_session,
        "context growth per session, tokens": stats.growth_tokens_per_session,
        "context growth per turn, tokens": stats.context_growth_tokens,
        "think time, s": stats.think_s,
    }
    ratio = "none" if stats.io_ratio is None else f"{stats.io_ratio:,.1f}"
    within = stats.intra_session_share_of_reuse
    facts = {
        "requests": f"{stats.requests:,}",
        "sessions": f"{stats.sessions:,}",
        "duration": f"{stats.duration_s:,.0f} s",
        "input tokens per output token": ratio,
        "input tokens of all tokens (prefill share)": _percent(stats.prefill_share),
        f"requests of the top {TOP_SESSIONS} sessions": _percent(
            stats.top_sessions_share_of_requests
        ),
        f"input tokens of the top {TOP_SESSIONS} sessions": _percent(
            stats.top_sessions_share_of_input_tokens
        ),
        "tokens per block": f"{stats.block_tokens:,}",
        "blocks": f"{stats.blocks:,}",
        "distinct blocks": f"{stats.distinct_blocks:,}",
        "blocks seen before in the session": _percent(stats.intra_session_reuse),
        "blocks seen before in other sessions only": _percent(
            stats.cross_session_reuse
        ),
        "of the reusable blocks, in the session": "none"
        if within is None
        else _percent(within),
        "APC, infinite cache": _percent(stats.apc_infinite),
    }
    if stats.apc_lru is not None:
        facts[f"APC, LRU cache of {stats.cache_blocks:,} blocks"] = _percent(
            stats.apc_lru
        )
    lines = [f"# {stats.source}", "", "| | |", "|---|---:|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", f"| | {' | '.join(COLUMNS)} |", "|---" + "|---:" * len(COLUMNS) + "|"]
    lines += [f"| {name} | {_row(spread)} |" for name, spread in spreads.items()]
    return "\n".join([*lines, "", *_sessions(stats.largest_sessions)]) + "\n"


def _sessions(rows: list[SessionRow]) -> list[str]:
    """Format the table of sessions; tokens."""
    head = f"| largest sessions | {' | '.join(SESSION_COLUMNS)} |"
    lines = [head, "|---" + "|---:" * len(SESSION_COLUMNS) + "|"]
    for row in rows:
        name, *values = msgspec.structs.astuple(row)
        cells = " | ".join(f"{value:,}" for value in values)
        lines.append(f"| {name.replace('|', '/')} | {cells} |")
    return lines


def _row(spread: Spread | None) -> str:
    if spread is None:
        return " | ".join(["0", *["-"] * (len(COLUMNS) - 1)])
    rest = (f"{getattr(spread, name):,.1f}" for name in COLUMNS[1:])
    return " | ".join([f"{spread.n:,}", *rest])


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


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
    """Make a table of each figure of the study, the trace's, and the distance."""
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
