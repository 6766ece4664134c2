# SPDX-License-Identifier: Apache-2.0
"""The curves of a run against |cache|: for report.html, and three as PNG and CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from kvtax.records.requests import Phase
from kvtax.report import PALETTE
from kvtax.report.document import Figure, Line, Numbers
from kvtax.stats.median_slope import batch_held_us, group_of, make_cells, slope_value
from kvtax.verdict.analysis import Analysis
from kvtax.verdict.measured import ConfigSteps, thin
from kvtax.verdict.metrics import TIMED, number
from kvtax.verdict.roles import Roles

BINS = 30
MIN_STEPS_PER_BIN = 20
MAX_STEPS = 300_000
BAND = {"p25_us": 0.25, "p50_us": 0.5, "p75_us": 0.75}


def binned_curves(steps: Mapping[str, ConfigSteps], time: str) -> pl.DataFrame:
    """p25, p50, p75 of `time` in the growth phase by |cache| bin and config.

    Repeat and batch size are held as in the verdict (batch_held_us), with the slope of
    the very times that are drawn. Bins are as wide in every config.
    """
    growths = {
        name: thin(
            one.decodes.filter(pl.col("phase") == Phase.GROWTH), MAX_STEPS
        ).drop_nulls(time)
        for name, one in steps.items()
    }
    drawn = {name: growth for name, growth in growths.items() if growth.height}
    if not drawn:
        return pl.DataFrame(schema={"config": pl.String})
    top = max(number(growth["cache_blocks"].max()) for growth in drawn.values())
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


def held_levels(analysis: Analysis) -> pl.DataFrame:
    """Tabulate what scheduler and connector take at each held level, by config."""
    rows = []
    for name, one in analysis.estimates.items():
        if (found := one.fits.get(HELD)) is None:
            continue
        for level, blocks in enumerate(found.x):
            us, error = found.contrast(np.eye(len(found.x))[level])
            reach = found.reach(error)
            rows.append((name, round(1e3 * float(blocks)), us, us - reach, us + reach))
    schema = {"config": pl.String, "cache_blocks": pl.Int64}
    schema |= dict.fromkeys(("us", "low_us", "high_us"), pl.Float64)
    return pl.DataFrame(rows, schema, orient="row").with_columns(
        pl.col(pl.Float64).round(3)
    )


def held_figure(analysis: Analysis) -> Figure | None:
    """Draw what scheduler and connector take at each held level; None without holds."""
    levels = held_levels(analysis)
    if not levels.height:
        return None
    x = levels["cache_blocks"].unique().sort().to_list()
    lines = []
    for (config,), own in levels.group_by("config", maintain_order=True):
        at = {row["cache_blocks"]: row for row in own.iter_rows(named=True)}
        low, middle, high = (
            [at[blocks][column] if blocks in at else None for blocks in x]
            for column in ("low_us", "us", "high_us")
        )
        lines.append(_line(analysis, str(config), low, middle, high))
    return Figure(
        title="Scheduler and connector calls at held levels of |cache|",
        note="The verdicts' evidence: steps while |cache| is held. Band: 95 % interval "
        "of the level.",
        x_label="cached block hashes, |cache|",
        y_label="scheduler and connector calls (µs)",
        x=x,
        lines=lines,
    )


def _line(
    analysis: Analysis, config: str, low: Numbers, middle: Numbers, high: Numbers
) -> Line:
    """Make the line of a config: of its colour, or grey where its cost is flat."""
    return Line(
        name=config,
        y=middle,
        low=low,
        high=high,
        place=analysis.roles.places[config],
        muted=analysis.document.configs[config].verdict == "flat",
    )


def held_passes(analysis: Analysis) -> pl.DataFrame:
    """Tabulate the passes of the floor's servers, and of a config's that grows.

    A level that a pass holds twice is the mean of both.
    """
    configs, profile = analysis.document.configs, analysis.document.profile
    growing = [name for name, one in configs.items() if one.verdict == "grows"]
    schema = {"config": pl.String, "repeat": pl.Int64, "pass": pl.Int64}
    schema |= {"cache_blocks": pl.Int64, "us": pl.Float64}
    tables = [pl.DataFrame(schema=schema)]
    number = (pl.col("hold") // profile.load.ladder.holds_per_pass).alias("pass")
    blocks = pl.col("cache_blocks").mean().over("level").round().cast(pl.Int64)
    for name in (analysis.roles.floor, *growing[:1]):
        if name in analysis.holds:
            own = analysis.holds[name].filter(
                pl.col(HELD).is_not_null(), pl.col("repeat") < profile.repeats
            )
            own = own.select("repeat", number, blocks, pl.col(HELD).alias("us"))
            means = own.group_by("repeat", "pass", "cache_blocks").agg(
                pl.col("us").mean().round(3)
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
        at = dict(zip(own["cache_blocks"], own["us"], strict=True))
        name = f"server {server}, pass {turn}"
        place = turn % colours + server * colours
        lines.append(Line(name=name, y=[at.get(one) for one in x], place=place))
    return Figure(
        title=passes["config"][0],
        note=passes["config"][0],
        x_label="cached block hashes, |cache|",
        y_label="scheduler and connector calls (µs)",
        x=x,
        lines=lines,
    )


# Metric of the figures of held levels: what a token waits for.
HELD = TIMED
BEFORE_AFTER = "before_after"
# Figure: what it draws and its label, of all configs but in BEFORE_AFTER.
CURVES = {
    "schedule_vs_cache": ("schedule_us", "schedule() time, p50 (µs)"),
    BEFORE_AFTER: ("overhead_us", "scheduler and connector calls, p50 (µs)"),
    "step_vs_cache": ("step_us", "engine step time, p50 (µs)"),
    "build_meta_vs_cache": ("build_meta_us", "build_connector_meta, p50 (µs)"),
}
# Those that documents show.
HELD_LEVELS, HELD_PASSES = "held_levels", "held_passes"
FILES = ("schedule_vs_cache",)


def draw_all(
    analysis: Analysis, steps: Mapping[str, ConfigSteps], folder: Path
) -> list[str]:
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
    }
    for name in FILES:
        curves = _curves(steps, analysis.roles, name)
        drawn[name] = curves, [_figure(analysis, name, curves)]
    for name, (data, figures) in drawn.items():
        if data.height:
            data.write_csv(folder / f"{name}.csv")
            png.draw(folder / f"{name}.png", *filter(None, figures))
    return [name for name, (data, _) in drawn.items() if data.height]


def curve_figure(
    steps: Mapping[str, ConfigSteps], analysis: Analysis, name: str
) -> Figure | None:
    """Draw a time against |cache|, a line per config; None without data."""
    return _figure(analysis, name, _curves(steps, analysis.roles, name))


def _curves(steps: Mapping[str, ConfigSteps], roles: Roles, name: str) -> pl.DataFrame:
    curves = binned_curves(steps, CURVES[name][0])
    if name != BEFORE_AFTER:
        return curves
    return curves.filter(pl.col("config").is_in(roles.before_after))


def _figure(analysis: Analysis, name: str, curves: pl.DataFrame) -> Figure | None:
    if not curves.height:  # of servers whose requests were late, there is no growth
        return None
    x = curves["cache_blocks"].unique().sort().to_list()
    lines = []
    for (config,), curve in curves.group_by("config", maintain_order=True):
        at = dict(zip(curve["cache_blocks"], curve.iter_rows(named=True), strict=True))
        low, middle, high = (
            [at[blocks][column] if blocks in at else None for blocks in x]
            for column in BAND
        )
        lines.append(_line(analysis, str(config), low, middle, high))
    return Figure(
        title=f"{CURVES[name][1]} against |cache|",
        note="Decode-only steps of growth; repeat and batch size held; band: p25 to "
        "p75.",
        x_label="cached block hashes, |cache|",
        y_label=CURVES[name][1],
        x=x,
        lines=lines,
    )
