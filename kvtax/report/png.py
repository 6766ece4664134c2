# SPDX-License-Identifier: Apache-2.0
"""Draw a figure of the document model as a PNG file."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from kvtax.report import PALETTE
from kvtax.report.document import Figure, Line

matplotlib.use("Agg")

# Distance between the labels of two lines, as a share of the y axis.
LABEL_GAP = 0.048


def draw(figure: Figure, path: Path) -> None:
    """Write a PNG: each line with its band, named at its right end."""
    picture, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    ends = [_draw_line(axes, figure.x, line) for line in figure.lines]
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(x for _, x, _ in ends))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(figure.note, fontsize=10, loc="left")
    _label_ends(axes, ends)
    picture.savefig(path, dpi=120)
    plt.close(picture)


def _draw_line(axes: plt.Axes, x: list[float], line: Line) -> tuple[float, float, Line]:
    """Draw a line and its band; return y and x of its right end, and the line."""
    place = line.place or 0
    colour, dash = PALETTE.colour(place), PALETTE.dash(place)
    y = np.array(line.y, dtype=float)
    known = ~np.isnan(y)
    at = np.array(x)[known]
    style = (0, dash) if dash else "-"
    axes.plot(at, y[known], linestyle=style, color=colour, linewidth=2)
    if line.low is not None and line.high is not None:
        low, high = np.array([line.low, line.high], dtype=float)[:, known]
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
    return float(y[known][-1]), float(at[-1]), line


def _label_ends(axes: plt.Axes, ends: list[tuple[float, float, Line]]) -> None:
    """Name the lines beside their right ends, pushed apart where names collide."""
    bottom, top = axes.get_ylim()
    gap = (top - bottom) * LABEL_GAP
    ends = sorted(ends, key=lambda end: end[:2])
    heights: list[float] = []
    for y, *_ in ends:
        heights.append(max(y, heights[-1] + gap) if heights else max(y, bottom))
    if heights[-1] > top:
        limits = [top - gap * below for below in reversed(range(len(heights)))]
        heights = list(map(min, heights, limits))
    for height, (y, x, line) in zip(heights, ends, strict=True):
        colour = PALETTE.colour(line.place or 0)
        axes.annotate(
            line.name,
            xy=(x, y),
            xytext=(1.03, height),
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
