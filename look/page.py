# SPDX-License-Identifier: Apache-2.0
"""The page of a folder of records: what the terminal is told, and each moment of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from lab.records.warning import RunWarning
from look.clients import SHARES
from look.clocks import Clock
from look.cost import Cost, Part
from look.instances import Instance
from look.moves import AXES, Slope
from look.timeline import part_name, time_line
from look.told import Told
from page.build import build
from page.document import Doubt, Flame, Page, Section, Table

# As many as a wide screen can show; fewer for each of many instances, so that the file
# stays below 3 MB.
INTERVALS = 1_000
ALL_INTERVALS = 6_000
REQUESTS = 4_000


class PageOfRecords:
    """A page that is made of one instance after the other, `count` in all."""

    def __init__(self, folder: Path, clock: Clock, count: int) -> None:
        self._folder, self._clock, self._count = folder, clock, max(count, 1)
        self._answer: list[str] = []
        self._doubts: list[Doubt] = []
        self._compared: list[list] = []
        self._sections: list[Section] = []

    def add(self, told: Told) -> None:
        instance = told.instance
        self._doubts += [_doubt(one, instance.name) for one in instance.warnings]
        if told.cost is None:
            self._answer.append(f"{told.title}.")
            return
        self._answer.append(_answer(told, told.cost))
        self._compared.append(_compared(instance, told.cost))
        name = instance.name if self._count > 1 else "The server"
        intervals = min(INTERVALS, ALL_INTERVALS // self._count)
        requests = REQUESTS // self._count
        self._sections += [
            time_line(name, instance, self._clock, intervals, requests),
            _cost_table(name, told.cost),
            _moves_table(name, told),
            *(_named(flame, name) for flame in instance.flames),
        ]
        if told.outside:
            self._sections.append(_clients_table(name, told.outside))

    def text(self, warnings: list[RunWarning]) -> str:
        """The file; `warnings` are those of no single instance."""
        sections = self._sections
        if self._count > 1:
            sections = [_side_by_side(self._compared), *sections]
        return build(
            Page(
                title=f"What the connector costs: {self._folder.resolve().name}",
                question="What does the KV connector add to the engine steps of this "
                "server, what does that move with, and which requests waited for it?",
                answer=self._answer,
                warnings=[*(_doubt(one, "") for one in warnings), *self._doubts],
                sections=sections,
                made=f"Made by python -m look from {self._count} instance"
                f"{'s'[: self._count != 1]}.",
            )
        )


def _named(flame: Flame, name: str) -> Flame:
    return msgspec.structs.replace(flame, title=f"{name}: {flame.title}")


def _doubt(warning: RunWarning, where: str) -> Doubt:
    return Doubt(where=where, message=warning.message, remedy=warning.remedy)


def _compared(instance: Instance, cost: Cost) -> list:
    """What a step of the instance takes, beside others."""
    of = {part.column: part for part in cost.parts}
    batch = instance.steps["scheduled"].mean()
    return [
        instance.name,
        cost.steps,
        None if batch is None else round(float(batch), 2),
        round(cost.step.mean_us, 1),
        round(of["model_us"].mean_us, 1),
        round(of["scheduler_us"].mean_us, 1),
        round(of["connector_us"].mean_us, 1),
        cost.methods[0].name if cost.methods else "",
        round(100 * of["connector_us"].share, 2),
        *(_p90_ms(instance.requests, name) for name in ("ttft_us", "tpot_us")),
    ]


def _side_by_side(rows: list[list]) -> Table:
    return Table(
        title="Side by side",
        note="Means over all steps. Two servers can be compared where they had the "
        "same traffic: see the batch.",
        columns=[
            *("instance", "steps", "batch", "step µs", "model µs", "scheduler µs"),
            *("connector µs", "most of it", "% of step", "TTFT p90 ms", "TPOT p90 ms"),
        ],
        rows=rows,
    )


def _p90_ms(requests: pl.DataFrame, column: str) -> float | None:
    us = requests[column].quantile(0.9)
    return None if us is None else round(us / 1e3, 2)


def _answer(told: Told, cost: Cost) -> str:
    connector = next(part for part in cost.parts if part.column == "connector_us")
    words = (
        f"{told.title}. A step takes {cost.step.mean_us:,.0f} µs on "
        f"average, and the connector's calls {connector.mean_us:,.1f} µs of it "
        f"({connector.share:.1%})"
    )
    if cost.methods and cost.methods[0].mean_us > 0:
        most = cost.methods[0]
        words += f", most of that {most.name} ({most.mean_us:,.1f} µs)"
    moved = [
        f"{slope.value:+,.1f} [{slope.low:+,.1f}, {slope.high:+,.1f}] µs per "
        f"{AXES[name].unit}"
        for name, slope in told.moves["connector_us"].items()
        if isinstance(slope, Slope) and slope.low > 0
    ]
    if moved:
        words += f". It moved with: {'; '.join(moved)}"
    if share := told.felt.get("e2e"):
        words += (
            f". Of a request's time the connector's calls were {share['p50']:.2%} at "
            f"the median and {share['p99']:.2%} at p99"
        )
    return words + "."


def _cost_table(name: str, cost: Cost) -> Table:
    def row(part: Part, words: str) -> list:
        times = (part.mean_us, part.p50_us, part.p99_us, part.most_us)
        calls = part.calls_per_step
        return [
            words,
            *(round(us, 2) for us in times),
            round(100 * part.share, 2),
            None if calls is None else round(calls, 3),
            None if part.exposed_us is None else round(part.exposed_us, 2),
        ]

    rows = [row(cost.step, "step")]
    for part in cost.parts:
        rows.append(row(part, part.name))
        if part.column == "connector_us":
            rows += [
                row(method, f"connector: {method.name}") for method in cost.methods
            ]
    return Table(
        title=f"{name}: what a step takes",
        note="Over all steps, none left out. A method's time is without that of the "
        f"methods it called. Per second of steps, the connector takes "
        f"{cost.connector_ms_per_s:,.1f} ms. Exposed: what a device beside the host "
        "waited for; a dash where none was recorded.",
        columns=[
            *("part", "mean µs", "p50 µs", "p99 µs", "most µs", "% of step", "calls"),
            "exposed µs",
        ],
        rows=rows,
    )


def _moves_table(name: str, told: Told) -> Table:
    rows = []
    for column, by_axis in told.moves.items():
        for axis, slope in by_axis.items():
            if isinstance(slope, Slope):
                numbers = [round(v, 3) for v in (slope.value, slope.low, slope.high)]
                rows.append([part_name(column), AXES[axis].unit, *numbers, ""])
            else:
                rows.append(
                    [part_name(column), AXES[axis].unit, None, None, None, slope]
                )
    return Table(
        title=f"{name}: what the connector's time moved with",
        note="All axes fitted at once, on means over 50 steps; 95 % intervals. This is "
        "what moved together in recorded traffic, not what is the reason: bash "
        "run_all.sh measures that.",
        columns=["calls", "per", "µs per step", "low", "high", "why not known"],
        rows=rows,
        open=False,
    )


def _clients_table(name: str, outside: list[list]) -> Table:
    return Table(
        title=f"{name}: what clients waited for",
        note="Before the engine: in the server, from a request's arrival there until "
        "the scheduler got it. On the way: all else, as to the server and back, a "
        "proxy between, and the server's work on the answer. Quantiles of parts do "
        "not add up; the parts of a single request do.",
        columns=["ms", *(f"p{100 * share:.0f}" for share in SHARES)],
        rows=[
            [part, *(None if ms is None else round(ms, 3) for ms in quantiles)]
            for part, *quantiles in outside
        ],
    )
