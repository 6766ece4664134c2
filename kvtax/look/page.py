# SPDX-License-Identifier: Apache-2.0
"""The page of a folder of records: tables as in the terminal, and each moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from kvtax.look.clients import on_the_way_us
from kvtax.look.discover import Clock
from kvtax.look.instance_summary import (
    InstanceSummary,
    waited_most,
)
from kvtax.look.instances import Instance
from kvtax.look.requests import TIMED_PARTS, WAITS
from kvtax.look.tables import Together, part_name, tables
from kvtax.records.warning import RunWarning, encodable
from kvtax.report import render
from kvtax.report.document import (
    Cell,
    Figure,
    Gauge,
    Line,
    Page,
    Requests,
    Section,
    TimeLine,
    Words,
)
from kvtax.steps.parts import STEP_PARTS

QUESTION = (
    "What does the KV connector add to the engine steps of this server, what does that "
    "move with, and which requests waited for it?"
)
# As many as a wide screen can show; fewer for each of many instances, so that the file
# stays below 3 MB.
INTERVALS = 1_000
ALL_INTERVALS = 6_000
REQUESTS = 4_000


class PageOfRecords:
    """A page that is made of one instance after the other, `count` in all."""

    def __init__(self, folder: Path, clock: Clock, count: int) -> None:
        self._folder, self._clock, self._count = folder, clock, max(count, 1)
        self._warnings: list[RunWarning] = []
        self._sections: list[Section] = []
        self._lines: dict[str, int] = {}

    def add(self, engine: str, summary: InstanceSummary) -> None:
        """Add tables, time line and flames of an instance, a life of `engine`."""
        instance = summary.instance
        self._warnings += [w.within(instance.name) for w in instance.warnings]
        if summary.cost is None:
            return
        name = instance.name if self._count > 1 else "The server"
        intervals = min(INTERVALS, ALL_INTERVALS // self._count)
        requests = REQUESTS // self._count
        line = time_line(name, instance, self._clock, intervals, requests)
        self._add_line(engine, line)
        for section in (*tables(summary), *instance.flames):
            title = f"{name}: {section.title}"
            self._sections.append(msgspec.structs.replace(section, title=title))

    def _add_line(self, engine: str, line: TimeLine) -> None:
        """Add a time line, or put it behind that of the engine's life before."""
        at = self._lines.setdefault(engine, len(self._sections))
        if at == len(self._sections):
            self._sections.append(line)
            return
        before = self._sections[at]
        assert isinstance(before, TimeLine)
        named = msgspec.structs.replace(before, title=engine)
        self._sections[at] = joined(named, line)

    def text(self, warnings: list[RunWarning], together: Together) -> str:
        """Render the file; `warnings` are those of no single instance."""
        sections, words = self._sections, [p for one in together.answers for p in one]
        folder = encodable(self._folder.resolve().name)
        if together.words:
            most, *others = together.answers
            words = [f"{together.words}.", *most]
            lines = [one for one in sections if isinstance(one, TimeLine)]
            answers = Words(
                title="The other instances",
                paragraphs=[paragraph for one in others for paragraph in one],
            )
            sections = [together.table, *_connectors(lines), answers, *sections]
        return render.html(
            Page(
                title=f"What the connector costs: {folder}",
                question="" if together.words else QUESTION,
                answer=words,
                warnings=[*warnings, *self._warnings],
                sections=sections,
                made=f"Made by kvtax look from {self._count} instance"
                f"{'s'[: self._count != 1]}.",
            )
        )


# Points and lines of the figure that compares instances.
POINTS, LINES = 60, 8
NOT_THE_CONNECTOR = ("model", "scheduler", "other")


def _connectors(lines: Sequence[TimeLine]) -> list[Figure]:
    """Draw what the connector takes per step over time, a line per instance."""
    begin_s = min((line.t_s[0] for line in lines), default=0.0)
    end_s = max((line.t_s[-1] for line in lines), default=0.0)
    width_s = max(end_s - begin_s, 1e-6) / POINTS
    drawn = {}
    for line in lines:
        methods = [
            of for name, of in line.parts.items() if name not in NOT_THE_CONNECTOR
        ]
        sums, steps = np.zeros(POINTS), np.zeros(POINTS)
        for t_s, count, *us in zip(line.t_s, line.steps, *methods, strict=True):
            if us and None not in us:
                at = min(int((t_s - begin_s) / width_s), POINTS - 1)
                sums[at] += count * sum(us)
                steps[at] += count
        if steps.any():
            drawn[line.title] = (sums, steps)
    means = {name: sums.sum() / steps.sum() for name, (sums, steps) in drawn.items()}
    shown = sorted(drawn, key=lambda name: -means[name])[:LINES]
    if len(shown) < 2:
        return []
    return [
        Figure(
            title="What the connector takes per step",
            note=f"the {LINES} of {len(drawn)} instances where it takes most"
            if len(drawn) > LINES
            else "",
            x_label="seconds since the first step of all",
            y_label="connector, µs per step",
            x=[round(begin_s + (i + 0.5) * width_s, 3) for i in range(POINTS)],
            lines=[
                Line(
                    name=name,
                    y=[
                        round(float(us / count), 1) if count else None
                        for us, count in zip(*drawn[name], strict=True)
                    ],
                )
                for name in shown
            ],
        )
    ]


# Methods with a layer of their own in the figure.
OWN_LAYER = 4
# Per interval on average, so that few are empty while the server works.
FEWEST_STEPS = 10


def time_line(
    name: str, instance: Instance, clock: Clock, intervals: int, most_requests: int
) -> TimeLine:
    """Means over equal intervals of time, each with its slowest step."""
    steps = instance.steps
    begin_ns, end_ns = (
        int(steps["t_ns"][0]),
        int(steps.select(pl.col("end_ns").max()).item()),
    )
    intervals = max(min(intervals, steps.height // FEWEST_STEPS), 1)
    width_ns = max((end_ns - begin_ns) // intervals, 1)
    layers = _layers(instance)
    everything = ["model_us", "scheduler_us", "other_us", *instance.methods]
    used = pl.lit(steps["free_blocks"].max()) - pl.col("free_blocks")
    gauges = {
        "|cache|, blocks": pl.col("cache_size"),
        "blocks in use": used,
        "running": pl.col("running"),
        "waiting": pl.col("waiting"),
    }
    interval = ((pl.col("t_ns") - begin_ns) // width_ns).set_sorted()
    found = (
        steps.with_columns(**{f"gauge.{n}": of for n, of in gauges.items()})
        .with_row_index("row")
        .group_by(interval.alias("interval"))
        .agg(
            pl.len().alias("steps"),
            *(of.mean().alias(f"layer.{n}") for n, of in layers.items()),
            pl.col("row").get(pl.col("step_us").arg_max()),
            *(pl.col(f"gauge.{n}").mean() for n in gauges),
        )
    )
    slowest = steps.select("step_id", "step_us", *everything)[found["row"]]
    found = found.hstack(slowest.select(pl.all().name.prefix("slowest.")))
    last = (end_ns - begin_ns) // width_ns
    since_ns = clock.since_zero_ns(instance.name, begin_ns)
    every = pl.DataFrame({"interval": pl.int_range(last + 1, eager=True)})
    rows = every.join(found, on="interval", how="left", maintain_order="left")

    def numbers(column: str) -> list[float | None]:
        return rows[column].cast(pl.Float64).round(1).to_list()

    return TimeLine(
        title=name,
        note=f"{steps.height:,} steps in intervals of {width_ns / 1e9:,.3f} s, from "
        f"the first step of all, {clock.utc}.",
        t_s=[round((since_ns + i * width_ns) / 1e9, 6) for i in range(last + 1)],
        steps=rows["steps"].fill_null(0).to_list(),
        parts={n: numbers(f"layer.{n}") for n in layers},
        slowest_us=numbers("slowest.step_us"),
        slowest_step=rows["slowest.step_id"].to_list(),
        slowest_parts={part_name(n): numbers(f"slowest.{n}") for n in everything},
        gauges=[
            Gauge(name=n, values=numbers(f"gauge.{n}"), of_requests="ing" in n)
            for n in gauges
        ],
        requests=_requests(instance, clock, most_requests),
    )


def _layers(instance: Instance) -> dict[str, pl.Expr]:
    """Choose the stacked layers, lowest first: the connector lies on the model."""
    methods = sorted(instance.methods, key=lambda name: -instance.steps[name].sum())
    own, rest = methods[:OWN_LAYER], methods[OWN_LAYER:]
    layers = {"model": pl.col("model_us"), "scheduler": pl.col("scheduler_us")}
    layers |= {part_name(name): pl.col(name) for name in own}
    if rest:
        layers["other calls of the connector"] = pl.sum_horizontal(rest)
    return layers | {"other": pl.col("other_us")}


def _requests(instance: Instance, clock: Clock, most: int) -> Requests | None:
    """Select requests: of too many, those that waited longest for the connector."""
    requests = instance.requests
    if not requests.height:
        return None
    shown = waited_most(requests, most)

    def ms(column: str) -> list[Cell]:
        if column not in shown.columns:
            return [None] * shown.height
        return (shown[column] / 1e3).round(3).to_list()

    def seconds(column: str) -> list[float]:
        moved_ns = clock.since_zero_ns(instance.name, 0)
        return ((shown[column] + moved_ns) / 1e9).round(6).to_list()

    connector, *others = TIMED_PARTS
    parts = (connector, *WAITS, *others)
    columns: dict[str, list[Cell]] = {
        f"{_wait_name(part)} ms": ms(f"e2e.{part}") for part in (*parts, "other_us")
    }
    columns |= {
        "E2E ms": ms("e2e_us"),
        "TTFT ms": ms("ttft_us"),
        "TPOT ms": ms("tpot_us"),
        "connector in TTFT ms": ms("ttft.connector_us"),
    }
    for fact in ("prompt_tokens", "cached_tokens", "external_tokens", "output_tokens"):
        columns[fact.replace("_", " ")] = shown[fact].to_list()
    columns["first step"] = shown["first_step"].to_list()
    columns["last step"] = shown["last_step"].to_list()
    columns["preemptions"] = shown["preemptions"].to_list()
    columns["ended by"] = shown["finish_reason"].to_list()
    if "client_e2e_us" in shown.columns:
        shown = shown.with_columns(on_the_way_us("e2e").alias("way_us"))
        columns |= {
            "client's id": shown["client_id"].to_list(),
            "client's E2E ms": ms("client_e2e_us"),
            "client's TTFT ms": ms("client_ttft_us"),
            "before the engine ms": ms("before_engine_us"),
            "on the way ms": ms("way_us"),
        }
    columns |= {
        f"{name.removesuffix('_us')} ms": ms(f"e2e.{name}") for name in instance.methods
    }
    return Requests(
        total=requests.height,
        ids=shown["id"].to_list(),
        arrival_s=seconds("arrival_ns"),
        end_s=seconds("end_ns"),
        columns=columns,
    )


def _wait_name(part: str) -> str:
    names = {"queued_us": "queued", "kv_wait_us": "waiting for KV"}
    return names.get(part) or STEP_PARTS[part]


def joined(line: TimeLine, later: TimeLine) -> TimeLine:
    """Put a later life behind an engine's time line, with a gap and a mark between."""
    width_s = line.t_s[1] - line.t_s[0] if len(line.t_s) > 1 else 0.0
    begun_s = later.t_s[0]
    sizes = (len(line.t_s), len(later.t_s))

    def both(name: str, gap: float | None = None) -> list[Any]:
        return [*getattr(line, name), gap, *getattr(later, name)]

    return TimeLine(
        title=line.title,
        note=f"{line.note} Restarted at {begun_s:,.1f} s. {later.note}",
        t_s=both("t_s", min(line.t_s[-1] + width_s, begun_s)),
        steps=both("steps", 0),
        parts=_columns(line.parts, later.parts, sizes, [None]),
        slowest_us=both("slowest_us"),
        slowest_step=both("slowest_step"),
        slowest_parts=_columns(line.slowest_parts, later.slowest_parts, sizes, [None]),
        gauges=[
            Gauge(
                name=one.name,
                values=[*one.values, None, *other.values],
                of_requests=one.of_requests,
            )
            for one, other in zip(line.gauges, later.gauges, strict=True)
        ],
        requests=_joined_requests(line.requests, later.requests),
        restarts_s=[*line.restarts_s, begun_s],
    )


def _joined_requests(
    first: Requests | None, second: Requests | None
) -> Requests | None:
    if first is None or second is None:
        return first or second
    sizes = (len(first.ids), len(second.ids))
    return msgspec.structs.replace(
        first,
        total=first.total + second.total,
        ids=[*first.ids, *second.ids],
        arrival_s=[*first.arrival_s, *second.arrival_s],
        end_s=[*first.end_s, *second.end_s],
        columns=_columns(first.columns, second.columns, sizes, []),
    )


def _columns(
    first: Mapping[str, Sequence[Any]],
    second: Mapping[str, Sequence[Any]],
    sizes: tuple[int, int],
    gap: list[None],
) -> dict[str, list[Any]]:
    """Put columns behind each other; one that is missing in a table is null there."""
    nothing = [[None] * size for size in sizes]
    return {
        name: [*first.get(name, nothing[0]), *gap, *second.get(name, nothing[1])]
        for name in {**first, **second}
    }
