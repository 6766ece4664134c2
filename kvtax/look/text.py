# SPDX-License-Identifier: Apache-2.0
"""Terminal pages: an instance by itself, and totals of many servers."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvtax.look.answer import answer
from kvtax.look.instance_summary import InstanceSummary
from kvtax.look.tables import LEAST_US, Together, tables
from kvtax.look.totals import (
    ALPHA,
    NOTHING,
    ServerTotals,
    StepTotals,
    mean_us,
    merge_totals,
    quantiles,
)
from kvtax.report import render
from kvtax.report.document import Cell, Page, Section, Table, Words
from kvtax.stats.distribution import as_float, share_of
from kvtax.stats.processes import mean_over_servers
from kvtax.steps.parts import STEP_PARTS

METHODS_SHOWN = 12
ROWS = {"step_us": "step"} | {
    column: f"  {part}" for column, part in STEP_PARTS.items()
}
TOTALS_HEAD = ["us per step", "mean", "p50", "p90", "p99", "most", "share", "calls"]
SHARES = (0.5, 0.9, 0.99)
# Ranges of |cache| in the table of totals, at most.
CACHE_ROWS = 10


def instance_text(summary: InstanceSummary) -> str:
    """Render all of an instance, as some thirty lines."""
    return render.terminal(
        Page(
            title=summary.title,
            question="",
            answer=answer(summary),
            warnings=summary.instance.warnings,
            sections=tables(summary),
            made="",
        )
    )


def together_text(together: Together) -> str:
    """Render several instances: their sums, a line for each, and their answers."""
    answers = [
        Words(title="", paragraphs=paragraphs) for paragraphs in together.answers
    ]
    return render.terminal(
        Page(
            title=f"{together.words}.",
            question="",
            answer=[],
            warnings=[],
            sections=[together.short_table, *answers],
            made="",
        )
    )


def totals_text(parts: dict[str, StepTotals]) -> str:
    """Render tables for each of `parts` by name, and for all. Raises RecordsError."""
    whole = merge_totals(parts.values())
    each = parts.items() if len(parts) > 1 else ()
    pages = [_totals_page(name, totals) for name, totals in each]
    return "\n\n".join(map(render.terminal, [*pages, _totals_page("all", whole)]))


def _totals_page(name: str, totals: StepTotals) -> Page:
    releases = {str(server.vllm_version) for server in totals.servers}
    by_time = {
        str(time): counts
        for (time,), counts in totals.counts.partition_by("time", as_dict=True).items()
    }
    sections: list[Section] = []
    if totals.steps:
        slope = _slope("connector_us", totals.servers)
        per = "The connector's us per step, per 1,000 cached blocks"
        sections = [
            _times(by_time, totals.servers),
            Words(title="", paragraphs=[f"{per}: {slope}"]),
            *_by_cache(by_time),
        ]
    return Page(
        title=f"{name}: vLLM {', '.join(sorted(releases)) or 'of unknown release'}, "
        f"{totals.steps:,} steps of {len(totals.servers)} servers",
        question="",
        answer=[],
        warnings=totals.warnings if name == "all" else [],
        sections=sections,
        made="",
    )


def _times(by_time: dict[str, pl.DataFrame], servers: Sequence[ServerTotals]) -> Table:
    methods = sorted(by_time.keys() - ROWS, key=lambda time: -mean_us(by_time[time]))
    shown = [time for time in methods if mean_us(by_time[time]) >= LEAST_US]
    labels = {time: f"    {time.removesuffix('_us')}" for time in shown[:METHODS_SHOWN]}
    *parts, other = ROWS
    rows: list[list[Cell]] = []
    left = 1.0
    for time, label in {**dict.fromkeys(parts), **labels, other: None}.items():
        name = label or ROWS[time]
        if time not in by_time:
            rows.append([name, "unknown", *[""] * (len(TOTALS_HEAD) - 2)])
            continue
        of = [one for one in servers if time in one.us]
        # Steps without a worker's record are taken to be like the others.
        us = sum(one.us[time] * one.steps for one in of)
        share = share_of(us, sum(one.covered_us for one in of))
        if time == "step_us":
            share = 1.0
        elif time == other:
            share = max(left, 0.0)
        elif time in ROWS:
            left -= share
        rows.append(_totals_row(name, by_time[time], share))
    note = f"quantiles are within {ALPHA:.0%}"
    return Table(title="", note=note, columns=TOTALS_HEAD, rows=rows)


def _totals_row(name: str, counts: pl.DataFrame, share: float) -> list[Cell]:
    calls = as_float(counts["calls"].sum()) / as_float(counts["steps"].sum())
    most_us = as_float(counts["most_ns"].max()) / 1e3
    us = [mean_us(counts), *quantiles(counts, SHARES), most_us]
    shown = [*(f"{one:,.1f}" for one in us), f"{share:.1%}"]
    return [name, *shown, f"{calls:,.2f}" * bool(calls)]


def _slope(time: str, servers: Sequence[ServerTotals]) -> str:
    """Describe the mean over servers, with an interval where there are several."""
    known = [s for server in servers if (s := server.slopes.get(time)) is not None]
    if not known:
        return "unknown: |cache| hardly went up and down, or was not recorded"
    mean = mean_over_servers(known)
    if mean.ci95 is None:
        return f"{mean.value:+,.2f} (one server: no interval)"
    return f"{mean:+,.2f} over servers"


def _by_cache(by_time: dict[str, pl.DataFrame]) -> list[Section]:
    """Tabulate step and connector in some ten ranges of |cache|."""
    highest = by_time["step_us"]["cache_from"].max()
    if highest is None:
        return []
    most = int(as_float(highest))
    width = (most // 1_000 // CACHE_ROWS + 1) * 1_000
    rows: list[list[Cell]] = []
    for low in range(0, most + 1, width):
        inside = pl.col("cache_from").is_between(low, low + width, closed="left")
        step, connector = (
            by_time.get(time, NOTHING).filter(inside)
            for time in ("step_us", "connector_us")
        )
        if step.height and connector.height:
            us = [*quantiles(step, (0.5, 0.99)), *quantiles(connector, (0.5, 0.99))]
            blocks, steps = f"{low:,} to {low + width:,}", int(step["steps"].sum())
            rows.append([blocks, steps, *(f"{one:,.1f}" for one in us)])
    columns = ["cached blocks", "steps", "step p50", "p99", "connector p50", "p99"]
    return [Table(title="", columns=columns, rows=rows)] if rows else []
