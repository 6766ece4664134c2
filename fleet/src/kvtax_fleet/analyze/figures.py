# SPDX-License-Identifier: Apache-2.0
"""The figure of a run's page: the ranking."""

from __future__ import annotations

import base64
from pathlib import Path

import matplotlib
from kvtax.report import PALETTE
from kvtax.report.document import Picture
from matplotlib import pyplot as plt

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
