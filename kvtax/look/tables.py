# SPDX-License-Identifier: Apache-2.0
"""The tables of a server: of the terminal and of the page."""

from __future__ import annotations

import polars as pl

from kvtax.look.clients import SHARES as CLIENT_SHARES
from kvtax.look.clients import on_the_way_us
from kvtax.look.instance_summary import (
    COVARIATES,
    Cost,
    InstanceSummary,
    Part,
    parts_of_requests,
    waited_most,
)
from kvtax.report.document import Cell, Section, Table
from kvtax.stats import Estimate
from kvtax.steps.parts import STEP_PARTS

REQUESTS_SHOWN = 5
OUTSIDE_SHOWN = 3
SPANS = ("ttft", "e2e")
# Mean us per step below which a method is left out while others take more.
LEAST_US = 0.05
ON_THE_WAY = (
    "Before the engine: in the server, from a request's arrival there until the "
    "scheduler got it. On the way: all else, as to the server and back, a proxy "
    "between, and the server's work on the answer. Quantiles of parts do not add up; "
    "the parts of a single request do."
)


def tables(summary: InstanceSummary) -> list[Section]:
    """Tabulate costs, covariates, requests and clients; nothing without steps."""
    if summary.cost is None:
        return []
    requests = summary.instance.requests
    sections: list[Section] = [cost_table(summary.cost), *_covariates(summary)]
    if requests.height:
        sections += _requests(summary)
    if summary.outside:
        sections += [_clients(summary.outside), _clients_slowest(requests)]
    return sections


def part_name(column: str) -> str:
    """Name a part of a step, or a method of the connector, by its column."""
    return STEP_PARTS.get(column, column.removesuffix("_us"))


def cost_table(cost: Cost) -> Table:
    """Tabulate a step, its parts, and the connector's methods inside of its part."""
    methods = [part for part in cost.methods if part.mean_us >= LEAST_US]
    parts = [(cost.step, ""), *((part, "  ") for part in cost.parts)]
    parts[-1:-1] = [(method, "    ") for method in methods]
    columns = ["us per step", "mean", "% of time", "p50", "p99", "most", "calls"]
    rows: list[list[Cell]] = [_cost_row(part, indent) for part, indent in parts]
    if cost.connector is None:
        rows.insert(-1, ["  connector", "unknown", *[""] * (len(columns) - 2)])
    return Table(
        title="What a step takes", note=_cost_note(cost), columns=columns, rows=rows
    )


def _cost_note(cost: Cost) -> str:
    hidden = sum(part.mean_us < LEAST_US for part in cost.methods)
    notes = [
        f"{hidden} more methods take less" * bool(hidden),
        cost.overlap or "",
        ""
        if cost.connector_ms_per_s is None
        else f"the connector takes {cost.connector_ms_per_s:,.1f} ms per s of steps",
        f"model, connector, the worker's calls and other are of the "
        f"{cost.worker_steps:,} steps that have a worker's record"
        if cost.worker_steps < cost.steps
        else "",
        *_outside("before the first step", cost.at_start_us),
        *_outside("between steps", cost.between_us),
    ]
    return "; ".join(filter(None, notes))


def _outside(when: str, us: dict[str, float]) -> list[str]:
    """Name the longest of the calls that are in no step, with their time."""
    longest = sorted(us.items(), key=lambda call: -call[1])
    calls = [f"{method} {took_us / 1e3:,.1f} ms" for method, took_us in longest]
    more = len(calls) - OUTSIDE_SHOWN
    shown = ", ".join(calls[:OUTSIDE_SHOWN]) + f" and {more} more" * (more > 0)
    return [f"{when}, in no share: {shown}"] if us else []


def _cost_row(part: Part, indent: str) -> list[Cell]:
    times = (part.p50_us, part.p99_us, part.most_us)
    calls = part.calls_per_step
    return [
        indent + part.name,
        f"{part.mean_us:,.1f}",
        f"{100 * part.share:.1f}",
        *(f"{us:,.1f}" for us in times),
        "" if calls is None else f"{calls:,.2f}",
    ]


def _covariates(summary: InstanceSummary) -> list[Section]:
    """Tabulate the slopes of the connector's time, then of each method, folded."""
    if not summary.slopes:
        return []
    connector, *methods = (
        (column, [_slope_row(axis, slope) for axis, slope in slopes.items()])
        for column, slopes in summary.slopes.items()
    )
    head = ["us per step", "low", "high", "why not known"]
    whole = Table(
        title="What the connector's time moved with",
        note="all covariates fitted at once; 95 % intervals; kvtax sweep measures "
        "whether one is the reason",
        columns=["moved by, per", *head],
        rows=connector[1],
    )
    rows = [[part_name(column), *row] for column, own in methods for row in own]
    each = Table(
        title="What each method's time moved with",
        columns=["calls", "per", *head],
        rows=rows,
        open=False,
    )
    return [whole, each] if rows else [whole]


def _slope_row(axis: str, slope: Estimate | str) -> list[Cell]:
    unit = COVARIATES[axis].unit
    if isinstance(slope, str):
        return [unit, None, None, None, slope]
    numbers = (slope.value, slope.low, slope.high)
    return [unit, *(f"{number:+,.2f}" for number in numbers), ""]


def _requests(summary: InstanceSummary) -> list[Section]:
    requests = summary.instance.requests
    parts: list[list[Cell]] = [
        [name, *(f"{of[span]:.2%}" if span in of else "" for span in SPANS)]
        for name, of in parts_of_requests(requests).items()
    ]
    names = {"ttft": "to the first token", "tpot": "per output token"}
    rows: list[list[Cell]] = [
        [
            names[span],
            f"{100 * felt.share.value:.2f}",
            *(f"{100 * end:.2f}" for end in (felt.share.low, felt.share.high)),
            f"{100 * felt.p50:.2f}",
            f"{100 * felt.p99:.2f}",
            felt.requests,
        ]
        for span, felt in summary.felt.items()
    ]
    felt = Table(
        title="The connector's share of what users wait for",
        note="a request counts by the time that it waited; 95 % intervals",
        columns=["time", "%", "low", "high", "median", "p99", "requests"],
        rows=rows,
    )
    split = Table(
        title="Where requests' time went",
        note="a request that is queued waits; in the other parts it is in a step",
        columns=["where requests' time went", "to the first token", "in all"],
        rows=parts,
    )
    return [
        *([split] if parts else []),
        *([felt] if rows else []),
        _waited_most(requests),
    ]


def _waited_most(requests: pl.DataFrame) -> Table:
    waits = {
        "connector ms": "e2e.connector_us",
        "queued ms": "e2e.queued_us",
        "KV ms": "e2e.kv_wait_us",
        "of ms": "e2e_us",
    }
    most = waited_most(requests, REQUESTS_SHOWN)
    waits = {name: wait for name, wait in waits.items() if wait in most.columns}
    rows: list[list[Cell]] = [
        [
            row["id"],
            *(_ms(row[wait]) for wait in waits.values()),
            row["prompt_tokens"],
        ]
        for row in most.iter_rows(named=True)
    ]
    return Table(
        title="Requests that waited most",
        note="requests of one step wait for the same calls: do not add these up",
        columns=["waited most", *waits, "prompt tokens"],
        rows=rows,
    )


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:,.1f}"


def _clients(outside: list[list[Cell]]) -> Table:
    rows: list[list[Cell]] = [
        [
            f"  {name}" if str(name).startswith("of it") else name,
            *(f"{ms:,.1f}" if isinstance(ms, float) else ms for ms in quantiles),
        ]
        for name, *quantiles in outside
    ]
    shares = [f"p{100 * share:.0f}" for share in CLIENT_SHARES]
    return Table(
        title="What clients waited for",
        note=ON_THE_WAY,
        columns=["clients waited, ms", *shares],
        rows=rows,
    )


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
            row["client_id"],
            *(_ms(row[wait]) for wait in waits),
            " to ".join(str(row[name]) for name in ("first_step", "last_step")),
        ]
        for row in slowest.iter_rows(named=True)
    ]
    return Table(
        title="Requests for which clients waited longest",
        columns=["slowest", *waits, "in steps"],
        rows=rows,
    )
