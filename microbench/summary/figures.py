# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, each a PNG with the numbers it draws in a CSV beside it."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import polars as pl
from matplotlib import pyplot as plt

from lab.stats.colours import COLOURS, LINES
from microbench.analysis.analysis import Analysis
from microbench.summary.curves import binned_curves

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
PART_COLOURS = (
    "#0072B2", "#D55E00", "#F0E442", "#999999", "#000000", "#CC79A7", "#56B4E9",
    "#009E73", "#DDDDDD",
)  # fmt: skip
BEFORE_AFTER = "before_after"
# Figure: what it draws and its label, of all configs but in BEFORE_AFTER.
CURVES = {
    "schedule_vs_cache": ("schedule_us", "schedule() time, p50 (µs)"),
    BEFORE_AFTER: ("overhead_us", "scheduler and connector calls, p50 (µs)"),
    "step_vs_cache": ("step_us", "engine step time, p50 (µs)"),
    "build_meta_vs_cache": ("build_meta_us", "build_connector_meta, p50 (µs)"),
}


def draw_all(analysis: Analysis, folder: Path) -> list[str]:
    """Write every figure that has data into `folder`; the names written."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    written = []
    for name, (time, label) in CURVES.items():
        curves = binned_curves(analysis.measured, time)
        if name == BEFORE_AFTER:
            shown = analysis.roles.before_after
            curves = curves.filter(pl.col("config").is_in(shown))
        if curves.height:
            curves.write_csv(folder / f"{name}.csv")
            draw_curves(curves, label, folder / f"{name}.png")
            written.append(name)
    parts = attribution_table(analysis)
    if parts.height:
        parts.write_csv(folder / "attribution.csv")
        draw_attribution(parts, folder / "attribution.png")
        written.append("attribution")
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


def attribution_table(analysis: Analysis) -> pl.DataFrame:
    """The parts of a step at the stated |cache|, one row per config, in us."""
    rows = [
        {"config": name} | entry.attribution_us
        for name, entry in analysis.document.configs.items()
        if entry.attribution_us
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def draw_attribution(parts: pl.DataFrame, path: Path) -> None:
    """Stacked bars, with the whole step's time written at the end."""
    figure, axes = plt.subplots(
        figsize=(9.5, 1.9 + 0.42 * parts.height), layout="constrained"
    )
    names = parts["config"].to_list()
    left = np.zeros(len(names))
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        width = parts[part].cast(pl.Float64).fill_null(0).to_numpy()
        drawn = np.maximum(width, 0)
        axes.barh(names, drawn, left=left, color=colour, label=part, height=0.7)
        left = left + drawn
    for name, end, step in zip(names, left, parts["step"], strict=True):
        axes.annotate(f" {step:,.0f} µs", (end, name), va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(right=left.max() * 1.12)
    axes.set_xlabel("part of a decode-only engine step (µs, interquartile mean)")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
