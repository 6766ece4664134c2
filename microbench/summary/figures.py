# SPDX-License-Identifier: Apache-2.0
"""The curves of a run against |cache|: for report.html, and two as PNG and CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import polars as pl
from matplotlib import pyplot as plt

from kvtax.records.requests import Phase
from kvtax.report import COLOURS, LINES
from kvtax.stats.median_slope import batch_held_us, group_of, make_cells, slope_value
from kvtax.verdict.analysis import Analysis
from kvtax.verdict.levels import thin
from kvtax.verdict.measured import Measured

BINS = 30
MIN_STEPS_PER_BIN = 20
MAX_STEPS = 300_000
BAND = {"p25_us": 0.25, "p50_us": 0.5, "p75_us": 0.75}


def binned_curves(measured: Mapping[str, Measured], time: str) -> pl.DataFrame:
    """p25, p50, p75 of `time` in the growth phase by |cache| bin and config.

    Repeat and batch size are held as in the verdict (batch_held_us), with the slope of
    the very times that are drawn. Bins are as wide in every config.
    """
    growths = {
        name: thin(
            one.steps.filter(pl.col("phase") == Phase.GROWTH), MAX_STEPS
        ).drop_nulls(time)
        for name, one in measured.items()
    }
    drawn = {name: growth for name, growth in growths.items() if growth.height}
    if not drawn:
        return pl.DataFrame(schema={"config": pl.String})
    top = max(growth["cache_blocks"].max() for growth in drawn.values())
    width = max(top, 1) / BINS
    return pl.concat(
        _binned(_held(growth, time), width).select(
            pl.lit(name).alias("config"), "cache_blocks", "steps", *BAND
        )
        for name, growth in drawn.items()
    )


def _held(growth: pl.DataFrame, time: str) -> pl.DataFrame:
    """Columns cache_blocks and us: `time` with repeat and batch size held."""
    blocks = growth["cache_blocks"].cast(pl.Float64).to_numpy()
    repeat, batch = (
        growth[name].cast(pl.Int64).to_numpy() for name in ("repeat", "batch")
    )
    us = batch_held_us(
        growth[time].cast(pl.Float64).to_numpy(),
        blocks,
        group_of(repeat, batch),
        slope_value(make_cells(growth, (time,)), time),
    )
    return pl.DataFrame({"cache_blocks": blocks, "us": us})


def _binned(held: pl.DataFrame, width: float) -> pl.DataFrame:
    """One row per bin of `width` blocks that has enough steps, at its middle."""
    place = (pl.col("cache_blocks") // width).clip(0, BINS - 1).alias("bin")
    return (
        held.group_by(place)
        .agg(
            pl.len().alias("steps"),
            *(
                pl.col("us").quantile(q, "linear").round(3).alias(column)
                for column, q in BAND.items()
            ),
        )
        .filter(pl.col("steps") >= MIN_STEPS_PER_BIN)
        .sort("bin")
        .with_columns(((pl.col("bin") + 0.5) * width).round(1).alias("cache_blocks"))
    )


matplotlib.use("Agg")

PARTS = (
    "schedule_without_build_meta",
    "build_meta",
    "bind",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "execute_model_rest",
    "update",
    "other",
)
BEFORE_AFTER = "before_after"
# Figure: what it draws and its label, of all configs but in BEFORE_AFTER.
CURVES = {
    "schedule_vs_cache": ("schedule_us", "schedule() time, p50 (µs)"),
    BEFORE_AFTER: ("overhead_us", "scheduler and connector calls, p50 (µs)"),
    "step_vs_cache": ("step_us", "engine step time, p50 (µs)"),
    "build_meta_vs_cache": ("build_meta_us", "build_connector_meta, p50 (µs)"),
}
# Those that documents show.
FILES = ("schedule_vs_cache", BEFORE_AFTER)


def draw_all(analysis: Analysis, folder: Path) -> list[str]:
    """Write the FILES that have data into `folder`; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    written = []
    for name in FILES:
        time, label = CURVES[name]
        curves = binned_curves(analysis.measured, time)
        if name == BEFORE_AFTER:
            shown = analysis.roles.before_after
            curves = curves.filter(pl.col("config").is_in(shown))
        if curves.height:
            curves.write_csv(folder / f"{name}.csv")
            draw_curves(curves, label, folder / f"{name}.png")
            written.append(name)
    return written


def draw_curves(curves: pl.DataFrame, label: str, path: Path) -> None:
    """One line per config with its middle-half band, named at its right end."""
    figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    ends = []
    names = curves["config"].unique(maintain_order=True).to_list()
    for index, name in enumerate(names):
        curve = curves.filter(pl.col("config") == name)
        colour = COLOURS[index % len(COLOURS)]
        x, y = curve["cache_blocks"].to_numpy(), curve["p50_us"].to_numpy()
        line = LINES[index // len(COLOURS) % len(LINES)]
        axes.plot(x, y, line, color=colour, linewidth=2)
        axes.fill_between(x, curve["p25_us"], curve["p75_us"], color=colour, alpha=0.12)
        ends.append((float(y[-1]), float(x[-1]), name, colour))
    axes.set_xlabel("cached block hashes, |cache| (blocks)")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(x for _, x, _, _ in ends))
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(
        "decode-only steps of growth, repeat and batch size held; band: p25 to p75",
        fontsize=10,
        loc="left",
    )
    _label_ends(axes, ends)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label_ends(axes: plt.Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Names beside the right ends of the lines, pushed apart where they collide."""
    bottom, top = axes.get_ylim()
    gap = (top - bottom) * 0.048
    ends = sorted(ends)
    at = bottom
    places = []
    for y, *_ in ends:
        at = max(y, at + gap) if places else max(y, bottom)
        places.append(at)
    over = places[-1] - top if places else 0
    for index in range(len(places) - 1, -1, -1):
        limit = top - (len(places) - 1 - index) * gap if over > 0 else places[index]
        places[index] = min(places[index], limit)
    for place, (y, x, name, colour) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.03, place),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=10,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 0,
            },
        )
