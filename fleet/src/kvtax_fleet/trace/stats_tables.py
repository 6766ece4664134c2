# SPDX-License-Identifier: Apache-2.0
"""Show a trace's statistics as Markdown."""

from __future__ import annotations

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
