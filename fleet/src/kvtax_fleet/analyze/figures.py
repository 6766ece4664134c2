# SPDX-License-Identifier: Apache-2.0
"""The figures of a run's page: the ranking, interference, sessions over time."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import polars as pl
from kvtax.report import PALETTE
from kvtax.report.document import Figure, Line, Picture
from matplotlib import pyplot as plt

from kvtax_fleet.analyze import interference
from kvtax_fleet.analyze.analysis import Analysis, names
from kvtax_fleet.analyze.load import session_curve
from kvtax_fleet.analyze.ranking import Rank

matplotlib.use("Agg")


def draw_ranking(loads: list[list[Rank]], out: Path) -> Picture:
    """Draw a panel for each load, a row for each arm, the best on top.

    Writes figures/ranking.png below `out`.
    """
    figure, axes = plt.subplots(
        len(loads),
        1,
        figsize=(9.5, 0.8 + sum(0.4 + 0.32 * len(ranks) for ranks in loads)),
        height_ratios=[len(ranks) + 1 for ranks in loads],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, ranks in zip(axes.flat, loads, strict=True):
        for place, rank in enumerate(ranks):
            level = rank.against_best
            panel.plot(level.value if level else 0, place, "o", color=PALETTE.colour(0))
            if level and level.ci95:
                panel.hlines(place, *level.ci95, color=PALETTE.colour(0), linewidth=2)
        panel.axvline(0, color="#000000", linewidth=0.8)
        panel.set_yticks(range(len(ranks)), [rank.arm for rank in ranks])
        panel.set_ylim(len(ranks) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes.flat[-1].set_xlabel("mean E2E, % over the best; lines: 95 % intervals")
    file = out / "figures" / "ranking.png"
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return Picture(
        title="Mean E2E of each arm over the best at its load",
        png=base64.b64encode(file.read_bytes()).decode(),
        file="figures/ranking.png",
    )


def figures(analysis: Analysis) -> Iterator[Figure]:
    """Yield the figures that have data."""
    loads: dict[str, dict[str, pl.DataFrame]] = {}
    for arm, points in analysis.interference.items():
        if points.height >= interference.MIN_REQUESTS:
            name, _, load = arm.partition("@")
            loads.setdefault(load, {})[name] = interference.binned(points)
    for load, bins in loads.items():
        yield _interference(load, bins)
    seen = set()
    for run in analysis.runs:
        if run.info.arm not in seen:
            curve = session_curve(analysis.of(run), names(run))
            if curve.height:
                seen.add(run.info.arm)
                yield _sessions(run.info.arm, curve)


def _interference(load: str, bins: dict[str, pl.DataFrame]) -> Figure:
    """Draw the median TPOT of each arm by concurrent prefill."""
    x = sorted({at for own in bins.values() for at in own["prefill_ktokens"]})
    lines = []
    for place, (name, own) in enumerate(bins.items()):
        rows = {at: rest for at, *rest in own.iter_rows()}
        low, y, high, _ = zip(*(rows.get(at, [None] * 4) for at in x), strict=True)
        line = Line(name=name, y=[*y], low=[*low], high=[*high], place=place)
        lines.append(line)
    return Figure(
        title="TPOT against the prefill under way at the same instance"
        + (f", {load} per instance" if load else ""),
        note="Requests in bins of equal number; p50, band p25 to p75.",
        x_label="new tokens in prefill (thousands, mean)",
        y_label="TPOT (ms)",
        x=x,
        lines=lines,
    )


def _sessions(arm: str, curve: pl.DataFrame) -> Figure:
    instances = curve.partition_by("instance", maintain_order=True)
    return Figure(
        title=f"Sessions living at each instance, {arm}, first repeat",
        x_label="s since the first request",
        y_label="sessions",
        x=instances[0]["t_s"].to_list(),
        lines=[
            Line(name=own["instance"][0], y=own["sessions"].to_list(), place=place)
            for place, own in enumerate(instances)
        ],
    )
