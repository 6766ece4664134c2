# SPDX-License-Identifier: Apache-2.0
"""The figures of a run: each is a PNG, with the numbers it draws in a CSV beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.report import PALETTE
from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kvtax_fleet.analyze import interference
from kvtax_fleet.analyze.analysis import Analysis, FleetAnalysis, names
from kvtax_fleet.analyze.frames import TITLES, Levels
from kvtax_fleet.analyze.load import session_curve
from kvtax_fleet.analyze.request_tables import best_window

matplotlib.use("Agg")

MARKS = {"p50": "o", "p90": "s", "p99": "^"}
# From here on, what is far off would press all others together.
FAR_PERCENT = 500
Draw = Callable[[pl.DataFrame, Path], None]


def draw_all(analysis: Analysis, folder: Path) -> dict[str, str | None]:
    """Write every figure that has data into `folder`.

    Returns, by figure, why it could not be drawn; None where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    results = analysis.results
    figures: dict[str, tuple[Callable[[], pl.DataFrame], Draw]] = {
        "ranking": (lambda: ranking_points(results), draw_ranking),
        "latency": (lambda: latency_points(results), draw_latency),
        "comparison": (lambda: comparison_points(results), draw_comparison),
        "interference": (lambda: interference_bins(analysis), draw_interference),
        "sessions": (lambda: session_curves(analysis), draw_sessions),
        "substrate": (lambda: substrate_steps(results), draw_substrate),
    }
    outcomes: dict[str, str | None] = {}
    for name, (collect, draw) in figures.items():
        try:
            data = collect()
            if data.height:
                data.write_csv(folder / f"{name}.csv")
                draw(data, folder / f"{name}.png")
                outcomes[name] = None
        # Matplotlib raises anything where data are odd, and numbers count for more.
        except Exception as error:
            plt.close("all")
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


def ranking_points(results: FleetAnalysis) -> pl.DataFrame:
    """Collect (concurrency, arm, percent, low, high): mean E2E over the best arm's."""
    rows: list[dict[str, Any]] = []
    for rank in results.ranking:
        level = rank.against_best or Estimate(0.0)
        low, high = level.ci95 or (None, None)
        row = {"concurrency": rank.concurrency, "arm": rank.arm}
        rows.append({**row, "percent": level.value, "low": low, "high": high})
    return pl.DataFrame(rows, infer_schema_length=None)


def draw_ranking(points: pl.DataFrame, path: Path) -> None:
    """One panel per concurrency, one row per arm, the best on top."""
    panels = points.partition_by("concurrency", maintain_order=True)
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9.5, 0.8 + sum(0.4 + 0.32 * own.height for own in panels)),
        height_ratios=[own.height + 1 for own in panels],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, own in zip(axes.flat, panels, strict=True):
        places, x = range(own.height), own["percent"].to_numpy()
        low, high = (own[end].cast(pl.Float64).to_numpy() for end in ("low", "high"))
        panel.hlines(places, low, high, color=PALETTE.colour(0), linewidth=2)
        panel.plot(x, places, "o", color=PALETTE.colour(0), markersize=6)
        panel.axvline(0, color="#000000", linewidth=0.8)
        panel.set_yticks(places, own["arm"].to_list())
        panel.set_ylim(own.height - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
    axes.flat[-1].set_xlabel("mean E2E, % over the best; lines: 95 % intervals")
    _save(figure, path)


def latency_points(results: FleetAnalysis) -> pl.DataFrame:
    """Collect (metric, arm, quantile, value, low, high) of all classes together."""
    rows = []
    for metric in TITLES:
        for arm, entry in results.arms.items():
            _, classes = best_window(entry.latency)
            levels: Levels = getattr(classes["all"], metric) if classes else {}
            for quantile, level in levels.items():
                if level:
                    rows.append(_point(level, metric=metric, arm=arm, at=quantile))
    return pl.DataFrame(rows, infer_schema_length=None)


def comparison_points(results: FleetAnalysis) -> pl.DataFrame:
    """Collect (metric, arm, quantile, value, low, high, reach_low, reach_high).

    In % of the baseline, with the A/A pairs; the last two are null without a pair.
    """
    rows = []
    for compared in results.comparisons:
        for metric, quantiles in (compared.percent or {}).items():
            for quantile, level in quantiles.items():
                if level and level.ci95:
                    arm = compared.arm + (" (A/A)" if compared.same else "")
                    reach = compared.reached(metric, quantile) or (None, None)
                    point = _point(level, metric=metric, arm=arm, at=quantile)
                    ends = dict(zip(("reach_low", "reach_high"), reach, strict=True))
                    rows.append(point | ends)
    return pl.DataFrame(rows, infer_schema_length=None)


def _point(level: Estimate, metric: str, arm: str, at: str) -> dict[str, Any]:
    low, high = level.ci95 or (None, None)
    value = {"value": level.value, "low": low, "high": high}
    return {"metric": metric, "arm": arm, "quantile": at} | value


def _panels(points: pl.DataFrame) -> tuple[Figure, list[Axes], list[str]]:
    arms = points["arm"].unique(maintain_order=True).to_list()
    figure, axes = plt.subplots(
        1,
        len(TITLES),
        figsize=(10.5, 1.6 + 0.55 * len(arms)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, (metric, title) in zip(axes[0], TITLES.items(), strict=True):
        panel.set_title(title, loc="left", fontsize=11)
        panel.grid(axis="x", alpha=0.3)
        panel.set_yticks(range(len(arms)), arms)
        own = points.filter(pl.col("metric") == metric)
        for offset, (quantile, mark) in enumerate(MARKS.items()):
            some = own.filter(pl.col("quantile") == quantile)
            y = _heights(some, arms, offset)
            x = some["value"].to_numpy()
            low = some["low"].cast(pl.Float64).fill_null(some["value"]).to_numpy()
            high = some["high"].cast(pl.Float64).fill_null(some["value"]).to_numpy()
            panel.hlines(y, low, high, color=PALETTE.colour(offset), linewidth=2)
            colour = PALETTE.colour(offset)
            panel.plot(x, y, mark, color=colour, markersize=6, label=quantile)
    axes[0][0].set_ylim(len(arms) - 0.5, -0.5)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False)
    return figure, list(axes[0]), arms


def _heights(points: pl.DataFrame, arms: list[str], offset: int) -> list[float]:
    """Return the position of each point of a quantile, the `offset`-th of MARKS."""
    return [arms.index(arm) + 0.22 * (offset - 1) for arm in points["arm"]]


def draw_latency(points: pl.DataFrame, path: Path) -> None:
    """One panel per metric, one row per arm: quantiles with their 95 % intervals."""
    figure, axes, _ = _panels(points)
    for panel in axes:
        # An axis without a positive point has no logarithmic scale.
        if not any((np.asarray(line.get_xdata()) > 0).any() for line in panel.lines):
            continue
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("ms (log)")
    _save(figure, path)


def draw_comparison(points: pl.DataFrame, path: Path) -> None:
    """Differences against the baseline; what equal arms reach is grey behind each."""
    figure, axes, arms = _panels(points)
    known = points.drop_nulls("reach_low")
    for panel, metric in zip(axes, TITLES, strict=True):
        for offset, quantile in enumerate(MARKS):
            own = known.filter(
                (pl.col("metric") == metric) & (pl.col("quantile") == quantile)
            )
            y = _heights(own, arms, offset)
            ends = own["reach_low"].to_list(), own["reach_high"].to_list()
            panel.hlines(y, *ends, color="#000000", alpha=0.12, linewidth=7)
        panel.axvline(0, color="#000000", linewidth=0.8)
        panel.set_xlabel("% against the baseline")
        if max(map(abs, panel.get_xlim())) > FAR_PERCENT:
            panel.set_xscale("symlog", linthresh=100)
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            panel.tick_params(axis="x", labelsize=7)
            panel.set_xlabel("% against the baseline (log beyond 100)")
    _save(figure, path)


def interference_bins(analysis: Analysis) -> pl.DataFrame:
    frames = [
        interference.binned(points).select(pl.lit(arm).alias("arm"), pl.all())
        for arm, points in analysis.interference.items()
        if points.height >= interference.MIN_REQUESTS
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def draw_interference(bins: pl.DataFrame, path: Path) -> None:
    """Draw a panel per load, a line per arm: median TPOT by concurrent prefill.

    The band is the middle half.
    """
    bins = bins.with_columns(
        pl.col("arm").str.replace("@.*", "").alias("name"),
        pl.col("arm").str.extract("@(.*)").alias("load"),
    )
    loads = bins["load"].unique(maintain_order=True).to_list()
    arms = bins["name"].unique(maintain_order=True).to_list()
    figure, axes = plt.subplots(
        len(loads),
        1,
        figsize=(9.5, 1.2 + 4 * len(loads)),
        squeeze=False,
        layout="constrained",
    )
    handles = {}
    for panel, load in zip(axes.flat, loads, strict=True):
        some = bins.filter(pl.col("load").eq_missing(load))
        for name in some["name"].unique(maintain_order=True):
            own = some.filter(pl.col("name") == name)
            handles[name] = _interference(panel, own, arms.index(name))
        if load is not None:
            panel.set_title(f"{load} per instance", loc="left", fontsize=10)
        panel.set_ylabel("TPOT, p50 (ms)")
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
        panel.grid(axis="y", alpha=0.3)
    axes.flat[-1].set_xlabel(
        "new tokens in prefill at the same instance (thousands, mean)"
    )
    figure.suptitle("requests in bins of equal number; band: p25 to p75", fontsize=10)
    figure.legend(
        handles.values(), handles, loc="outside right upper", frameon=False, fontsize=10
    )
    _save(figure, path)


def _interference(panel: Axes, bins: pl.DataFrame, index: int) -> Artist:
    colour, dash = PALETTE.colour(index), PALETTE.dash(index)
    style = (0, dash) if dash else "-"
    x = bins["prefill_ktokens"].to_numpy()
    (line,) = panel.plot(
        x, bins["p50_ms"], "o", linestyle=style, color=colour, markersize=4
    )
    panel.fill_between(x, bins["p25_ms"], bins["p75_ms"], color=colour, alpha=0.12)
    return line


def session_curves(analysis: Analysis) -> pl.DataFrame:
    """(arm, t_s, instance, sessions) of each arm's first repeat."""
    seen: dict[str, pl.DataFrame] = {}
    for run in analysis.runs:
        if run.info.arm not in seen:
            curve = session_curve(analysis.of(run), names(run))
            if curve.height:
                seen[run.info.arm] = curve
    frames = [c.select(pl.lit(arm).alias("arm"), pl.all()) for arm, c in seen.items()]
    return pl.concat(frames) if frames else pl.DataFrame()


def draw_sessions(curves: pl.DataFrame, path: Path) -> None:
    """One panel per arm, one line per instance."""
    arms = curves["arm"].unique(maintain_order=True).to_list()
    columns = min(len(arms), 3)
    rows = -(-len(arms) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(3.6 * columns, 6), 2.6 * rows + 0.6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, arm in zip(axes.flat, arms, strict=False):
        own = curves.filter(pl.col("arm") == arm)
        for index, name in enumerate(own["instance"].unique(maintain_order=True)):
            line = own.filter(pl.col("instance") == name)
            colour = PALETTE.colour(index)
            panel.step(line["t_s"], line["sessions"], color=colour, label=name)
        panel.set_title(arm, loc="left", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
        panel.yaxis.get_major_locator().set_params(integer=True)
    for panel in axes.flat[len(arms) :]:
        panel.set_visible(False)
    figure.supxlabel("s since the first request", fontsize=10)
    figure.supylabel("sessions living there", fontsize=10)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if len(labels) <= 8:
        figure.legend(
            handles, labels, loc="outside upper right", ncols=len(labels), frameon=False
        )
    _save(figure, path)


def substrate_steps(results: FleetAnalysis) -> pl.DataFrame:
    """Collect (chain, metric, quantile, layer, arm, level, added) of every chain.

    `low` and `high`: the interval of `added`.
    """
    rows = [
        {
            "chain": f"{chain.policy}@{chain.concurrency}",
            "metric": chain.metric,
            "quantile": chain.quantile,
            "layer": step.layer,
            "arm": step.arm,
            "level": step.level.value if step.level else None,
            "added": step.added.value if step.added else None,
            "low": interval[0] if interval else None,
            "high": interval[1] if interval else None,
        }
        for chain in results.substrate
        for step in chain.steps
        for interval in [step.added.ci95 if step.added else None]
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def draw_substrate(steps: pl.DataFrame, path: Path) -> None:
    """Waterfalls, a row for each chain and quantile: each bar from the level before."""
    chains = steps.select("chain", "quantile").unique(maintain_order=True).rows()
    layers = steps["layer"].n_unique()
    figure, axes = plt.subplots(
        len(chains),
        len(TITLES),
        figsize=(12, 0.6 + (0.9 + 0.3 * layers) * len(chains)),
        squeeze=False,
        layout="constrained",
    )
    for row, (chain, quantile) in zip(axes, chains, strict=True):
        for panel, (metric, title) in zip(row, TITLES.items(), strict=True):
            own = steps.filter(
                (pl.col("metric") == metric)
                & (pl.col("chain") == chain)
                & (pl.col("quantile") == quantile)
            ).drop_nulls("level")
            if own.is_empty():
                panel.set_visible(False)
                continue
            _waterfall(panel, own)
            first = f"{own['layer'][0]} {own['level'][0]:,.1f} ms"
            text = f"{title} {quantile}, {chain}: {first}"
            panel.set_title(text, loc="left", fontsize=9)
        for panel in row[1:]:
            panel.set_yticklabels([])
    figure.supxlabel(
        "% over the same quantile of the first; lines: 95 % intervals of each step",
        fontsize=10,
    )
    _save(figure, path)


def _waterfall(panel: Axes, steps: pl.DataFrame) -> None:
    """Draw a bar per layer, in % of the first one's level; its own bar is empty."""
    percent = 100 / steps["level"][0]
    ends = percent * steps["level"].to_numpy() - 100
    starts = np.concatenate([[0.0], ends[:-1]])
    places = np.arange(len(ends))
    colours = np.where(ends >= starts, PALETTE.colour(3), PALETTE.colour(2))
    panel.barh(places, ends - starts, left=starts, color=colours, height=0.6)
    low, high = (
        starts + percent * steps[name].cast(pl.Float64).to_numpy()
        for name in ("low", "high")
    )
    panel.hlines(places[1:], low[1:], high[1:], color="black", linewidth=1)
    for place, (end, start) in enumerate(zip(ends, starts, strict=True)):
        if place:
            at = (1.02, place)
            kind = ("axes fraction", "data")
            panel.annotate(f"{end - start:+.1f} %", at, xycoords=kind, va="center")
    panel.axvline(0, color="grey", linewidth=0.8)
    panel.set_yticks(places, steps["layer"].to_list(), fontsize=9)
    panel.invert_yaxis()


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)
