# SPDX-License-Identifier: Apache-2.0
"""All instances below a folder: engines, the lives of each, and their totals."""

from __future__ import annotations

import polars as pl

from kvtax.look.discover import Clock, ServerFiles
from kvtax.look.instance_summary import Cost, InstanceSummary
from kvtax.look.instances import Instance
from kvtax.report.document import Cell, Table
from kvtax.stats.distribution import as_float

COLUMNS = [
    *("instance", "steps", "batch", "step µs", "model µs", "scheduler µs"),
    *("connector µs", "most of it", "% of time", "TTFT p90 ms", "TPOT p90 ms"),
    *("requests", "began, s", "lasted, s"),
]
SHOWN_IN_TERMINAL = [
    *("instance", "began, s", "lasted, s", "steps", "requests", "step µs"),
    *("connector µs", "% of time"),
]


class Together:
    """Rows of instances side by side, and sums over all of them."""

    def __init__(self, found: list[ServerFiles], clock: Clock) -> None:
        self._engines = len({one.engine for one in found})
        self._clock = clock
        self._lives = self._steps = self._requests = 0
        self._covered_us = self._connector_us = self._known_us = 0.0
        self._rows: list[list[Cell]] = []

    def add(self, summary: InstanceSummary) -> None:
        """Add an instance."""
        self._lives += 1
        self._requests += summary.instance.requests.height
        if (cost := summary.cost) is None:
            return
        self._steps += cost.steps
        covered_us = cost.period_us * cost.steps
        self._covered_us += covered_us
        if cost.connector:
            self._known_us += covered_us
            self._connector_us += cost.connector.mean_us * cost.steps
        self._rows.append(self._row(summary.instance, cost))

    @property
    def words(self) -> str:
        """Sum up all instances in a sentence; empty for a single one."""
        if self._lives < 2:
            return ""
        share = "an unknown part"
        if self._known_us:
            share = f"{self._connector_us / self._known_us:.1%}"
        return (
            f"In all: {self._engines:,} engine{'s'[: self._engines != 1]} with "
            f"{self._lives:,} lives, {self._steps:,} steps in "
            f"{self._covered_us / 1e6:,.0f} s of steps, {self._requests:,} requests. "
            f"The connector takes {share} of the time in which steps ran"
        )

    @property
    def table(self) -> Table:
        """Compare the instances that have steps."""
        return Table(
            title="Side by side",
            note="Means over all steps. Two servers can be compared where they had the "
            "same traffic: see the batch.",
            columns=COLUMNS,
            rows=self._rows,
        )

    @property
    def short_table(self) -> Table:
        """Compare them in fewer columns."""
        at = [COLUMNS.index(name) for name in SHOWN_IN_TERMINAL]
        rows = [[row[i] for i in at] for row in self._rows]
        return Table(title="", columns=SHOWN_IN_TERMINAL, rows=rows)

    def _row(self, instance: Instance, cost: Cost) -> list[Cell]:
        of = {part.column: part for part in cost.parts}
        batch = instance.steps["scheduled"].mean()
        connector: tuple[Cell, Cell, Cell] = (None, "unknown", None)
        if cost.connector:
            us, share = cost.connector.mean_us, 100 * cost.connector.share
            connector = (round(us, 1), cost.methods[0].name, round(share, 2))
        began_ns = self._clock.since_zero_ns(instance.name, instance.steps["t_ns"][0])
        return [
            instance.name,
            cost.steps,
            None if batch is None else round(as_float(batch), 2),
            round(cost.step.mean_us, 1),
            round(of["model_us"].mean_us, 1),
            round(of["scheduler_us"].mean_us, 1),
            *connector,
            *(_p90_ms(instance.requests, name) for name in ("ttft_us", "tpot_us")),
            instance.requests.height,
            round(began_ns / 1e9, 1),
            round(cost.seconds, 1),
        ]


def _p90_ms(requests: pl.DataFrame, column: str) -> float | None:
    us = requests[column].quantile(0.9)
    return None if us is None else round(us / 1e3, 2)
