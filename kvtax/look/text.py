# SPDX-License-Identifier: Apache-2.0
"""Terminal pages: an instance by itself, and totals of many servers."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvtax.look.clients import SHARES as CLIENT_SHARES
from kvtax.look.clients import on_the_way_us
from kvtax.look.instance_summary import (
    AXES,
    Cost,
    InstanceSummary,
    Part,
    parts_of_requests,
    waited_most,
)
from kvtax.look.together import Together
from kvtax.look.totals import (
    ALPHA,
    NOTHING,
    Server,
    StepTotals,
    mean_us,
    merge_totals,
    quantiles,
)
from kvtax.report import render
from kvtax.report.document import Cell, Page, Section, Table, Words
from kvtax.stats.distribution import as_float
from kvtax.stats.processes import mean_over_servers
from kvtax.steps.parts import STEP_PARTS

REQUESTS_SHOWN = 5
SPANS = ("ttft", "e2e")
METHODS_SHOWN = 12
# Mean us per step below which the terminal leaves out a method; the page has all.
LEAST_US = 0.05
ROWS = {"step_us": "step"} | {
    column: f"  {part}" for column, part in STEP_PARTS.items()
}
TOTALS_HEAD = ["us per step", "mean", "p50", "p90", "p99", "most", "share", "calls"]
SHARES = (0.5, 0.9, 0.99)
# Ranges of |cache| in the table of totals, at most.
CACHE_ROWS = 10


def instance_text(summary: InstanceSummary) -> str:
    """Render all of an instance, as some thirty lines."""
    sections: list[Section] = []
    if summary.cost is not None:
        sections = [_cost(summary.cost), *_covariates(summary)]
        if summary.instance.requests.height:
            sections += _requests(summary)
        if summary.outside:
            sections.append(_clients(summary.outside))
            sections.append(_clients_slowest(summary.instance.requests))
    return render.terminal(
        Page(
            title=summary.title,
            question="",
            answer=[],
            warnings=summary.instance.warnings,
            sections=sections,
            made="",
        )
    )


def together_text(together: Together) -> str:
    """Render the sums over several instances and a line for each; empty for one."""
    if not together.words:
        return ""
    return render.terminal(
        Page(
            title=f"{together.words}.",
            question="",
            answer=[],
            warnings=[],
            sections=[together.short_table],
            made="",
        )
    )


def _cost(cost: Cost) -> Table:
    methods = [part for part in cost.methods if part.mean_us >= LEAST_US]
    shown = methods[:METHODS_SHOWN]
    parts = [(cost.step, ""), *((part, "  ") for part in cost.parts)]
    parts[-1:-1] = [(method, "    ") for method in shown]
    columns = ["us per step", "mean", "p50", "p99", "most", "share", "calls", "exposed"]
    rows: list[list[Cell]] = [_cost_row(part, indent) for part, indent in parts]
    if cost.connector is None:
        rows.insert(-1, ["  connector", "unknown", *[""] * (len(columns) - 2)])
    if all(part.exposed_us is None for part, _ in parts):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    hidden = len(cost.methods) - len(shown)
    notes = [f"{hidden} more methods take less"] if hidden else []
    note = "; ".join([*notes, *filter(None, [cost.overlap])])
    return Table(title="", note=note, columns=columns, rows=rows)


def _cost_row(part: Part, indent: str) -> list[Cell]:
    times = (part.mean_us, part.p50_us, part.p99_us, part.most_us)
    calls, exposed_us = part.calls_per_step, part.exposed_us
    return [
        indent + part.name,
        *(f"{us:,.1f}" for us in times),
        f"{part.share:.1%}",
        "" if calls is None else f"{calls:,.2f}",
        "" if exposed_us is None else f"{exposed_us:,.1f}",
    ]


def _covariates(summary: InstanceSummary) -> list[Section]:
    rows: list[list[Cell]] = [
        [
            f"  per {AXES[axis].unit}",
            f"unknown: {slope}" if isinstance(slope, str) else f"{slope:+,.2f}",
        ]
        for axis, slope in summary.slopes.get("connector_us", {}).items()
    ]
    columns = ["The connector's us per step moved by", ""]
    return [Table(title="", columns=columns, rows=rows)] if rows else []


def _requests(summary: InstanceSummary) -> list[Section]:
    parts: list[list[Cell]] = [
        [f"  {name}", *(f"{of[span]:.2%}" if span in of else "" for span in SPANS)]
        for name, of in parts_of_requests(summary.instance.requests).items()
    ]
    names = {"ttft": "until its first token", "e2e": "in all"}
    shares = [
        f"  {names[span]}: {share['p50']:.2%} at the median, {share['p99']:.2%} at p99"
        for span, share in summary.felt.items()
    ]
    waits = {
        "connector ms": "e2e.connector_us",
        "queued ms": "e2e.queued_us",
        "KV ms": "e2e.kv_wait_us",
        "of ms": "e2e_us",
    }
    most = waited_most(summary.instance.requests, REQUESTS_SHOWN)
    waits = {name: wait for name, wait in waits.items() if wait in most.columns}
    rows = [
        [
            f"  {row['id']}",
            *(f"{row[wait] / 1e3:,.1f}" for wait in waits.values()),
            row["prompt_tokens"],
        ]
        for row in most.iter_rows(named=True)
    ]
    title = "The connector's share of a request's time"
    split = Table(
        title="",
        note="a request that is queued waits; in the other parts it is in a step",
        columns=["where requests' time went", "to the first token", "in all"],
        rows=parts,
    )
    return [
        *([split] if parts else []),
        *([Words(title=title, paragraphs=shares)] if shares else []),
        Table(
            title="",
            note="requests of one step wait for the same calls: do not add these up",
            columns=["waited most", *waits, "prompt tokens"],
            rows=rows,
        ),
    ]


def _clients(outside: list[list[Cell]]) -> Table:
    rows: list[list[Cell]] = [
        [
            f"  {name}" if str(name).startswith("of it") else name,
            *(f"{ms:,.1f}" if isinstance(ms, float) else ms for ms in quantiles),
        ]
        for name, *quantiles in outside
    ]
    shares = [f"p{100 * share:.0f}" for share in CLIENT_SHARES]
    return Table(title="", columns=["clients waited, ms", *shares], rows=rows)


def _clients_slowest(requests: pl.DataFrame) -> Table:
    """Tabulate the requests for which clients waited longest, and in which steps."""
    waits = {
        "E2E ms": pl.col("client_e2e_us"),
        "TTFT ms": pl.col("client_ttft_us"),
        "on the way ms": on_the_way_us("e2e"),
        "queued ms": pl.col("e2e.queued_us"),
    }
    if "e2e.connector_us" in requests.columns:
        waits["connector ms"] = pl.col("e2e.connector_us")
    slowest = (
        requests.drop_nulls("client_e2e_us")
        .sort("client_e2e_us", descending=True)
        .head(REQUESTS_SHOWN)
        .with_columns(**waits)
    )
    rows: list[list[Cell]] = [
        [
            f"  {row['client_id']}",
            *("" if row[wait] is None else f"{row[wait] / 1e3:,.1f}" for wait in waits),
            " to ".join(str(row[name]) for name in ("first_step", "last_step")),
        ]
        for row in slowest.iter_rows(named=True)
    ]
    return Table(title="", columns=["slowest", *waits, "in steps"], rows=rows)


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


def _times(by_time: dict[str, pl.DataFrame], servers: Sequence[Server]) -> Table:
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
        covered_us = sum(one.covered_us for one in servers if time in one.us)
        share = as_float(by_time[time]["sum_ns"].sum()) / 1e3 / (covered_us or 1.0)
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


def _slope(time: str, servers: Sequence[Server]) -> str:
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
