# SPDX-License-Identifier: Apache-2.0
"""Rows of costs.direct_read.transfer as Markdown, and whether they reach our aim."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from costs.results import facts_list
from lab.stats.aims import Aim, judge
from lab.stats.interval import Interval
from lab.stats.markdown import number, table

CONNECTOR = "connector"
RUNS, SINGLE = "bare, an entry per run", "bare, an entry per block"
AIM = Aim(what="throughput of the connector, to the bare engine", at_least=0.9)


class Case(NamedTuple):
    block_bytes: int
    layout: str
    blocks: int


class Row(msgspec.Struct):
    """One case. Throughputs in GB/s, ratios of the connector's to a bare one's."""

    case: Case
    rounds: int
    runs: int
    gb_per_s: dict[str, float]
    to_bare: dict[str, Interval]
    valid_share: float
    read_ms: dict[str, dict[str, float]]


def document(rows: list[Row], facts: dict[str, Any]) -> str:
    """The whole text."""
    labels = [
        [f"{row.case.block_bytes >> 10} KiB", row.case.layout, str(row.case.blocks)]
        for row in rows
    ]
    throughput = [
        label
        + [str(row.runs), *(number(gb, 2) for gb in row.gb_per_s.values())]
        + [f"{found:.3f}, {judge(found, AIM)}" for found in row.to_bare.values()]
        for label, row in zip(labels, rows, strict=True)
    ]
    latency = [
        label
        + [
            number(ms, 2)
            for part in row.read_ms.values()
            for ms in (part["p50"], part["p99"])
        ]
        + [f"{100 * row.valid_share:.1f}"]
        for label, row in zip(labels, rows, strict=True)
    ]
    head = ["block", "layout", "blocks"]
    ratios = [f"connector to {name} (aim {AIM.at_least})" for name in (RUNS, SINGLE)]
    quantile_head = [
        f"{part} ms {q}"
        for part in ("lookup", "read", "validate", "whole")
        for q in ("p50", "p99")
    ]
    parts = [
        "# How long a direct read takes the instance that reads",
        f"{rows[0].rounds} rounds of each; GB/s.",
        table([*head, "runs", *rows[0].gb_per_s, *ratios], throughput),
        "The whole read, as the connector does it:",
        table([*head, *quantile_head, "% valid"], latency),
        "## How this was made",
        facts_list(facts),
    ]
    return "\n\n".join(parts) + "\n"
