# SPDX-License-Identifier: Apache-2.0
"""What the terminal is told of an instance."""

from __future__ import annotations

from lab.records.warning import RunWarning
from look.cost import Cost, Part, waited_most
from look.moves import AXES, Slope
from look.told import Told

REQUESTS_SHOWN = 5
METHODS_SHOWN = 12
# Below this a method is left out of the terminal; the page has all.
LEAST_US = 0.05


def text(told: Told) -> str:
    """All of an instance, as some thirty lines."""
    lines = [told.title]
    if told.cost is not None:
        lines += ["", *_cost_table(told.cost), "", *_moves_lines(told)]
        lines += [*_request_lines(told), *_client_lines(told.outside)]
    lines += warning_lines(told.instance.warnings)
    return "\n".join(lines)


def warning_lines(warnings: list[RunWarning]) -> list[str]:
    if not warnings:
        return []
    return ["", "Warnings", *(f"  {warning}." for warning in warnings)]


def _cost_table(told: Cost) -> list[str]:
    head = ["us per step", "mean", "p50", "p99", "most", "share", "calls", "exposed"]
    shown = [part for part in told.methods if part.mean_us >= LEAST_US][:METHODS_SHOWN]
    rows = [head, _row(told.step)]
    for part in told.parts:
        rows.append(_row(part, "  "))
        if part.column == "connector_us":
            rows += [_row(method, "    ") for method in shown]
    if all(part.exposed_us is None for part in told.parts):
        rows = [row[:-1] for row in rows]
    lines = aligned(rows)
    if left := len(told.methods) - len(shown):
        lines.append(f"    and {left} more methods, which take less")
    return lines


def _row(part: Part, indent: str = "") -> list[str]:
    calls = "" if part.calls_per_step is None else f"{part.calls_per_step:,.2f}"
    times = (part.mean_us, part.p50_us, part.p99_us, part.most_us)
    return [
        indent + part.name,
        *(f"{us:,.1f}" for us in times),
        f"{part.share:.1%}",
        calls,
        "" if part.exposed_us is None else f"{part.exposed_us:,.1f}",
    ]


def _moves_lines(told: Told) -> list[str]:
    rows = []
    for name, slope in told.moves["connector_us"].items():
        unit = f"per {AXES[name].unit}"
        if isinstance(slope, Slope):
            found = f"{slope.value:+,.2f} [{slope.low:+,.2f}, {slope.high:+,.2f}]"
            rows.append(["  " + unit, found])
        else:
            rows.append(["  " + unit, f"unknown: {slope}"])
    return ["The connector's us per step moved by", *aligned(rows)]


def _request_lines(told: Told) -> list[str]:
    requests = told.instance.requests
    if not requests.height:
        return []
    lines = ["", "Of a request's time, the connector's calls were"]
    names = {"ttft": "until its first token", "e2e": "in all"}
    for span, share in told.felt.items():
        p50, p99 = share["p50"], share["p99"]
        lines.append(f"  {names[span]}: {p50:.2%} at the median, {p99:.2%} at p99")
    head = ["waited most", "connector ms", "queued ms", "KV ms", "of ms", "prompt"]
    rows = [head]
    for row in waited_most(requests, REQUESTS_SHOWN).iter_rows(named=True):
        waits = ("e2e.connector_us", "e2e.queued_us", "e2e.kv_wait_us", "e2e_us")
        times = (f"{row[wait] / 1e3:,.1f}" for wait in waits)
        rows.append([f"  {row['id']}", *times, f"{row['prompt_tokens']:,}"])
    note = "  (requests of one step wait for the same calls: do not add these up)"
    return [*lines, "", *aligned(rows), note]


def _client_lines(outside: list[list]) -> list[str]:
    if not outside:
        return []
    rows = [["clients waited, ms", "p50", "p90", "p99"]]
    for name, *quantiles in outside:
        indent = "  " if name.startswith("of it") else ""
        told = ("-" if ms is None else f"{ms:,.1f}" for ms in quantiles)
        rows.append([indent + name, *told])
    return ["", *aligned(rows)]


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows as lines, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
