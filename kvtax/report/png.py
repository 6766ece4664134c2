# SPDX-License-Identifier: Apache-2.0
"""Draw a figure of the document model as a PNG file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from kvtax.report import PALETTE
from kvtax.report.document import Figure, Line

matplotlib.use("Agg")

# Distance between the labels of two lines, as a share of the y axis.
LABEL_GAP = 0.048


def draw(path: Path, *figures: Figure) -> None:
    """Write a PNG of figures side by side, each line named at its right end."""
    picture, panels = plt.subplots(
        1, len(figures), figsize=(9.5, 5.2), layout="constrained", squeeze=False
    )
    for figure, axes in zip(figures, panels[0], strict=True):
        _draw_panel(axes, figure)
    picture.savefig(path, dpi=120)
    plt.close(picture)


def _draw_panel(axes: Axes, figure: Figure) -> None:
    # Coloured lines lie over grey ones.
    lines = sorted(figure.lines, key=lambda line: not line.muted)
    ends = [_draw_line(axes, figure.x, line) for line in lines]
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(x for _, x, _ in ends))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(figure.note, fontsize=10, loc="left")
    _label_ends(axes, ends)


def _draw_line(axes: Axes, x: list[float], line: Line) -> tuple[float, float, Line]:
    """Draw a line and its band; return y and x of its right end, and the line."""
    place = line.place or 0
    colour, dash = _colour(line), PALETTE.dash(place)
    y = np.array(line.y, dtype=float)
    known = ~np.isnan(y)
    at = np.array(x)[known]
    style = (0, dash) if dash else "-"
    axes.plot(at, y[known], linestyle=style, color=colour, linewidth=2)
    if line.low is not None and line.high is not None:
        low, high = np.array([line.low, line.high], dtype=float)[:, known]
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
    return float(y[known][-1]), float(at[-1]), line


def _colour(line: Line) -> str:
    return PALETTE.muted if line.muted else PALETTE.colour(line.place or 0)


@dataclass
class _Label:
    """Names of lines, the highest first, and where they end: `x`, `low` to `y`."""

    names: list[str]
    x: float
    low: float
    y: float
    line: Line

    @property
    def middle(self) -> float:
        return (self.low + self.y) / 2


def _labels(ends: list[tuple[float, float, Line]], gap: float) -> list[_Label]:
    """Name the lines, the lowest first; grey ones that meet share a label."""
    labels: list[_Label] = []
    for y, x, line in sorted(ends, key=lambda end: end[:2]):
        last = labels[-1] if labels else None
        if last and line.muted and last.line.muted and y - last.y < gap / 2:
            last.names.insert(0, line.name)
            last.y = y
        else:
            labels.append(_Label([line.name], x, y, y, line))
    return labels


def _label_ends(axes: Axes, ends: list[tuple[float, float, Line]]) -> None:
    """Name the lines beside their right ends, pushed apart where names collide."""
    bottom, top = axes.get_ylim()
    gap = (top - bottom) * LABEL_GAP
    labels = _labels(ends, gap)
    below = bottom - gap / 2
    tops = []
    for label in labels:
        size = gap * len(label.names)
        below = max(label.middle + size / 2, below + size)
        tops.append(below)
    above = top + gap / 2
    for label, highest in reversed([*zip(labels, tops, strict=True)]):
        size = gap * len(label.names)
        above = min(above, highest) - size
        axes.annotate(
            "\n".join(label.names),
            xy=(label.x, label.middle),
            xytext=(1.03, above + size / 2),
            textcoords=axes.get_yaxis_transform(),
            color=_colour(label.line),
            fontsize=10,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": _colour(label.line),
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 0,
            },
        )
