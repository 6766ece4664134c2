# SPDX-License-Identifier: Apache-2.0
"""The curves of a run against |cache|: for report.html, and as PNG and CSV."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from kvtax.report import PALETTE
from kvtax.report.document import Figure, Line, Numbers
from kvtax.verdict.analysis import Analysis
from kvtax.verdict.holds import OWN
from kvtax.verdict.metrics import TIMED
from microbench.summary.words import growing_first

X_LABEL = "cached block hashes, |cache|"
SHARE_LABEL = "scheduler and connector (% of own work)"
# Metric of the figures of held levels: a token waits for it.
HELD = TIMED
HELD_LEVELS, HELD_PASSES, GROWTH = "held_levels", "held_passes", "schedule_vs_cache"
# What the figures show, by file.
SHOWN = {
    HELD_LEVELS: "Scheduler and connector at held levels of |cache|",
    HELD_PASSES: "The same, pass by pass",
    GROWTH: "schedule() while |cache| grows",
}


def held_levels(analysis: Analysis) -> pl.DataFrame:
    """Tabulate each held level by config, in % of own work."""
    rows = []
    for name, entry in analysis.document.configs.items():
        if (held := entry.held.get(HELD)) is not None:
            rows += [
                (name, blocks, level, level - error, level + error)
                for blocks, level, error in zip(
                    held.cache_blocks, held.levels, held.errors, strict=True
                )
            ]
    schema = {"config": pl.String, "cache_blocks": pl.Int64}
    schema |= dict.fromkeys(("percent", "low", "high"), pl.Float64)
    return pl.DataFrame(rows, schema, orient="row").with_columns(
        pl.col(pl.Float64).round(3)
    )


def held_figure(analysis: Analysis) -> Figure | None:
    """Draw the held levels of each config; None without holds."""
    levels = held_levels(analysis)
    if not levels.height:
        return None
    lines = _lines(analysis, levels, ("low", "percent", "high"))
    return Figure(
        title=SHOWN[HELD_LEVELS],
        note="Steps while |cache| is held. Band: 95 % interval of the level.",
        x_label=X_LABEL,
        y_label=SHARE_LABEL,
        x=levels["cache_blocks"].unique().sort().to_list(),
        lines=lines,
    )


def held_passes(analysis: Analysis) -> pl.DataFrame:
    """Tabulate the passes of the floor's servers, and of a config's that grows.

    A level that a pass holds twice is the mean of both.
    """
    profile = analysis.document.profile
    first = growing_first(analysis.document)[:1]
    growing = [n for n in first if analysis.document.configs[n].verdict == "grows"]
    schema = {"config": pl.String, "repeat": pl.Int64, "pass": pl.Int64}
    schema |= {"cache_blocks": pl.Int64, "percent": pl.Float64}
    tables = [pl.DataFrame(schema=schema)]
    number = (pl.col("hold") // profile.load.ladder.holds_per_pass).alias("pass")
    blocks = pl.col("cache_blocks").mean().over("level").round().cast(pl.Int64)
    percent = (100 * pl.col(HELD) / pl.col(OWN)).alias("percent")
    for name in (analysis.roles.floor, *growing):
        if name in analysis.holds:
            own = analysis.holds[name].filter(
                pl.col(HELD).is_not_null(), pl.col(OWN) > 0, pl.col("many") == 0
            )
            means = (
                own.select("repeat", number, blocks, percent)
                .group_by("repeat", "pass", "cache_blocks")
                .agg(pl.col("percent").mean().round(3))
            )
            means = means.select(pl.lit(name).alias("config"), *means.columns)
            tables.append(means.sort("repeat", "pass", "cache_blocks"))
    return pl.concat(tables)


def _passes_figure(passes: pl.DataFrame) -> Figure:
    """Draw a line for each pass: passes by colour, servers by dash."""
    x, colours = passes["cache_blocks"].unique().sort().to_list(), len(PALETTE.colours)
    lines = []
    for own in passes.partition_by("repeat", "pass"):
        server, turn = own["repeat"][0], own["pass"][0]
        at = dict(zip(own["cache_blocks"], own["percent"], strict=True))
        name = f"server {server}, pass {turn}"
        place = turn % colours + server * colours
        lines.append(Line(name=name, y=[at.get(blocks) for blocks in x], place=place))
    return Figure(
        title=passes["config"][0],
        note=passes["config"][0],
        x_label=X_LABEL,
        y_label=SHARE_LABEL,
        x=x,
        lines=lines,
    )


def growth_curves(analysis: Analysis) -> pl.DataFrame:
    """Tabulate schedule() in growth by |cache| bin and config."""
    rows = [
        (name, *row)
        for name, config in analysis.evidence.configs.items()
        if (curve := config.curve) is not None
        for row in zip(
            curve.cache_blocks, curve.p25_us, curve.p50_us, curve.p75_us, strict=True
        )
    ]
    columns = ("cache_blocks", "p25_us", "p50_us", "p75_us")
    schema: dict[str, pl.DataType] = dict.fromkeys(columns, pl.Float64())
    schema = {"config": pl.String(), **schema}
    return pl.DataFrame(rows, schema, orient="row")


def growth_figure(analysis: Analysis) -> Figure | None:
    """Draw schedule() against |cache| while it grows; None without growth."""
    curves = growth_curves(analysis)
    if not curves.height:  # of servers whose requests were late, there is no growth
        return None
    return Figure(
        title=SHOWN[GROWTH],
        note="Decode-only steps of growth. Band: p25 to p75.",
        x_label=X_LABEL,
        y_label="schedule() time, p50 (µs)",
        x=curves["cache_blocks"].unique().sort().to_list(),
        lines=_lines(analysis, curves, ("p25_us", "p50_us", "p75_us")),
    )


def _lines(
    analysis: Analysis, table: pl.DataFrame, columns: tuple[str, str, str]
) -> list[Line]:
    """Make a line of each config: of its colour, or grey where its cost is flat."""
    x = table["cache_blocks"].unique().sort().to_list()
    lines = []
    for (config,), own in table.group_by("config", maintain_order=True):
        at = {row["cache_blocks"]: row for row in own.iter_rows(named=True)}
        values: list[Numbers] = [
            [at[blocks][column] if blocks in at else None for blocks in x]
            for column in columns
        ]
        low, middle, high = values
        lines.append(
            Line(
                name=str(config),
                y=middle,
                low=low,
                high=high,
                place=analysis.roles.places[str(config)],
                muted=analysis.document.configs[str(config)].verdict == "flat",
            )
        )
    return lines


def draw_all(analysis: Analysis, folder: Path) -> list[str]:
    """Write the figures that have data into `folder`; return their names."""
    from kvtax.report import png

    folder.mkdir(parents=True, exist_ok=True)
    passes = held_passes(analysis)
    drawn: dict[str, tuple[pl.DataFrame, list[Figure | None]]] = {
        HELD_LEVELS: (held_levels(analysis), [held_figure(analysis)]),
        HELD_PASSES: (
            passes,
            [_passes_figure(p) for p in passes.partition_by("config")],
        ),
        GROWTH: (growth_curves(analysis), [growth_figure(analysis)]),
    }
    for name, (data, figures) in drawn.items():
        if data.height:
            data.write_csv(folder / f"{name}.csv")
            png.draw(folder / f"{name}.png", *filter(None, figures))
    return [name for name, (data, _) in drawn.items() if data.height]
