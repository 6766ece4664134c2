# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of a kvbench run: a PNG each, with its numbers in a CSV."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import polars as pl
from matplotlib import pyplot as plt

from kvtax.report import COLOURS

matplotlib.use("Agg")

HERE = Path(__file__).parent


def main() -> None:
    trials = json.loads((HERE / "results.json").read_text())["trials"]
    folder = HERE / "figures"
    folder.mkdir(exist_ok=True)
    plt.rcParams.update(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    for name, table, draw in (
        ("bursts", bursts(trials), draw_bursts),
        ("usable", usable(trials), draw_usable),
    ):
        table.write_csv(folder / f"{name}.csv")
        draw(table, folder / f"{name}.png")


def bursts(trials: list[dict]) -> pl.DataFrame:
    """Median over the rounds of p50 and p99 (µs), by index and shape, on all cores."""
    cores = max(trial["gomaxprocs"] for trial in trials)
    rows = [
        {
            "index": trial["design"],
            "readers": trial["burst"]["readers"],
            "blocks": trial["burst"]["blocks"],
            "p50_us": trial["burst"]["latency"]["p50_us"],
            "p99_us": trial["burst"]["latency"]["p99_us"],
        }
        for trial in trials
        if trial.get("burst") and trial["gomaxprocs"] == cores
    ]
    return (
        pl.DataFrame(rows)
        .group_by("index", "readers", "blocks", maintain_order=True)
        .agg(pl.median("p50_us", "p99_us"), rounds=pl.len())
        .sort("readers", "blocks", "p50_us")
    )


def usable(trials: list[dict]) -> pl.DataFrame:
    """Share of a trace's blocks that were where the index said, by its capacity."""
    rows = [
        {
            "trace": trial["replay"]["trace"],
            "index": trial["design"],
            "capacity_keys": trial["replay"]["capacity"],
            "usable_ratio": trial["replay"]["usable_ratio"],
        }
        for trial in trials
        if trial.get("replay")
    ]
    return pl.DataFrame(rows).sort("trace", "index", "capacity_keys")


def draw_bursts(table: pl.DataFrame, path: Path) -> None:
    """Draw a line from p50 to p99 per index, a panel per shape."""
    shapes = table.select("readers", "blocks").unique(maintain_order=True).rows()
    order = table.filter(readers=shapes[0][0], blocks=shapes[0][1])["index"].to_list()
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(11, 4.2), sharey=True, sharex=True, squeeze=False
    )
    for axes, (readers, blocks) in zip(panels[0], shapes, strict=True):
        axes.set_title(f"{readers} lookups of {blocks} blocks at once", fontsize=11)
        for index, p50, p99 in (
            table.filter(readers=readers, blocks=blocks)
            .select("index", "p50_us", "p99_us")
            .iter_rows()
        ):
            y = order.index(index)
            colour = COLOURS[4] if index.startswith("kvindex") else COLOURS[7]
            axes.plot([p50, p99], [y, y], color=colour, linewidth=2)
            axes.plot(p50, y, "o", color=colour)
            axes.plot(p99, y, "|", color=colour, markersize=12, markeredgewidth=2)
        axes.set_xscale("log")
        axes.set_xlabel("latency (µs), dot p50, bar p99")
        axes.grid(axis="x", alpha=0.3)
    panels[0][0].set_yticks(range(len(order)), order)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_usable(table: pl.DataFrame, path: Path) -> None:
    """Usable share against capacity, a panel per trace."""
    traces = table["trace"].unique().sort().to_list()
    indexes = table["index"].unique().sort().to_list()
    figure, panels = plt.subplots(
        1, len(traces), figsize=(3.2 * len(traces), 4), squeeze=False
    )
    for axes, trace in zip(panels[0], traces, strict=True):
        for n, index in enumerate(indexes):
            line = table.filter(trace=trace, index=index)
            axes.plot(
                line["capacity_keys"],
                line["usable_ratio"],
                marker="o",
                color=COLOURS[n % len(COLOURS)],
                linestyle="-" if index == "kvindex" else "--",
                label=index,
            )
        axes.set_title(trace, fontsize=11)
        capacities = (
            table.filter(trace=trace)["capacity_keys"].unique().sort().to_list()
        )
        axes.set_xticks(capacities, [f"{keys // 1_000}k" for keys in capacities])
        axes.set_xlabel("capacity (keys)")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("usable share of the blocks asked for")
    figure.tight_layout()
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        ncols=len(indexes),
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
