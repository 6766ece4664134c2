# SPDX-License-Identifier: Apache-2.0
"""A trace's statistics as Markdown."""

from __future__ import annotations

from fleet.trace.stats import TOP_SESSIONS, Spread, Stats

COLUMNS = ("n", "mean", "p50", "p90", "p99", "max")


def markdown(stats: Stats) -> str:
    """The statistics as people read them."""
    spreads = {
        "input tokens": stats.input_tokens,
        "output tokens": stats.output_tokens,
        "turns per session": stats.turns_per_session,
        "context growth per turn, tokens": stats.context_growth_tokens,
        "think time, s": stats.think_s,
    }
    ratio = "none" if stats.io_ratio is None else f"{stats.io_ratio:,.1f}"
    facts = {
        "requests": f"{stats.requests:,}",
        "sessions": f"{stats.sessions:,}",
        "duration": f"{stats.duration_s:,.0f} s",
        "input tokens per output token": ratio,
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
    return "\n".join(lines) + "\n"


def _row(spread: Spread | None) -> str:
    if spread is None:
        return " | ".join(["0", *["-"] * (len(COLUMNS) - 1)])
    rest = (f"{getattr(spread, name):,.1f}" for name in COLUMNS[1:])
    return " | ".join([f"{spread.n:,}", *rest])


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
