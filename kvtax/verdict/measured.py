# SPDX-License-Identifier: Apache-2.0
"""Estimates of each config of a run, from the levels at which |cache| was held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kvtax.records.profile import ProfileRecord
from kvtax.records.requests import Phase
from kvtax.stats.distribution import SEED, Distribution
from kvtax.stats.held import Fit, Holds, fit
from kvtax.stats.median_slope import Cells, make_cells, slope_us_per_1k_blocks
from kvtax.stats.processes import look_level, student
from kvtax.steps.trial_steps import NO_THREADS
from kvtax.verdict.holds import held_steps, holds_of, places
from kvtax.verdict.levels import Level
from kvtax.verdict.metrics import (
    ALL_PARTS,
    LEVELS,
    METRICS,
    PART_METRICS,
    SUMMED,
    Metric,
)
from kvtax.verdict.trials import LoadedTrial


@dataclass
class Fits:
    """Levels of a metric: `usual` without the slowest steps, `mean` of all steps.

    A median has no `mean`.
    """

    usual: Fit
    mean: Fit | None = None


@dataclass
class ConfigEstimates:
    """Steps of a config's good trials, and the estimates from them.

    `every` are all steps, `steps` the decode-only ones, `held` those of the holds, and
    `at` the holds' places (kvtax.verdict.holds). `cells` are of the growth phase, as
    are `growth_slopes`, of `schedule` and `overhead`. `level` is None if the config
    has no steps there. `fits` are by metric; `slopes` in us per 1,000 cached blocks,
    and `p50`, the medians at the stated |cache|, come from them.
    """

    name: str
    every: pl.DataFrame
    threads: pl.DataFrame
    held: pl.DataFrame
    at: pl.DataFrame
    cells: Cells
    level: Level | None
    fits: dict[str, Fits] = field(default_factory=dict)
    slopes: dict[str, Distribution] = field(default_factory=dict)
    p50: dict[str, Distribution] = field(default_factory=dict)
    growth_slopes: dict[str, Distribution | None] = field(default_factory=dict)

    @property
    def steps(self) -> pl.DataFrame:
        return self.every.filter("decode_only")

    def slope_of(self, time: str) -> Fit | None:
        """Fit the levels of one column of `held`, over all steps."""
        holds = holds_of(self.held, self.at, Metric(time, "all", "mean"))
        return _fit(holds)


def measure_all(
    by_config: Mapping[str, Sequence[LoadedTrial]], profile: ProfileRecord
) -> dict[str, ConfigEstimates]:
    """Measure every config that has steps, by name."""
    measured = {}
    for index, (name, trials) in enumerate(by_config.items()):
        tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
        if tables:
            every = pl.concat(tables, how="diagonal", rechunk=False)
            known = [t.threads for t in trials if t.threads is not None]
            threads = pl.concat([NO_THREADS, *known])
            seed = SEED + 1_000 * index
            measured[name] = _measure(name, every, threads, profile, seed)
    return measured


def _measure(
    name: str,
    every: pl.DataFrame,
    threads: pl.DataFrame,
    profile: ProfileRecord,
    seed: int,
) -> ConfigEstimates:
    ladder = profile.load.ladder
    times = tuple(metric.time for metric in LEVELS.values())
    in_growth = every.filter("decode_only", pl.col("phase") == Phase.GROWTH)
    columns = ("repeat", "batch", "cache_blocks", *times)
    held = held_steps(every, ladder.decoders)
    one = ConfigEstimates(
        name=name,
        every=every,
        threads=threads,
        held=held,
        at=places(held, threads),
        cells=make_cells(in_growth.select(columns), times),
        level=Level.of(held, ladder.stated_level),
    )
    one.growth_slopes = {
        metric: slope_us_per_1k_blocks(one.cells, LEVELS[metric].time)
        for metric in ("schedule", "overhead")
    }
    one.fits = fits_of(one.held, one.at)
    level, wide = ladder.stated_level, look_level(profile.looks)
    for place, (metric, found) in enumerate(one.fits.items()):
        usual = found.usual
        one.slopes[metric] = slope_of(usual, wide, seed + place)
        if metric in LEVELS and level < len(usual.x):
            at = np.eye(len(usual.x))[level]
            p50, error = usual.contrast(at)
            one.p50[metric] = student(p50, error, usual.df, seed + 100 + place)
    return one


def slope_of(found: Fit, level: float, seed: int = SEED) -> Distribution:
    """Return the slope in us per 1,000 blocks, known in `level` of runs."""
    slope, error = found.slope()
    return student(slope, error, found.df, seed, level)


def fits_of(held: pl.DataFrame, at: pl.DataFrame) -> dict[str, Fits]:
    """Fit the levels of every metric that was measured; see ConfigEstimates."""
    found = {}
    for name, metric in METRICS.items():
        holds = holds_of(held, at, metric)
        if holds is None or (usual := fit(holds)) is None:
            continue
        found[name] = Fits(usual)
        if name in PART_METRICS:
            found[name].mean = _fit(holds_of(held, at, metric, robust=False))
    usual, mean = (_fit(_summed(held, at, robust)) for robust in (True, False))
    if usual is not None:
        found[ALL_PARTS] = Fits(usual, mean)
    return found


def _fit(holds: Holds | None) -> Fit | None:
    return None if holds is None else fit(holds)


def _summed(held: pl.DataFrame, at: pl.DataFrame, robust: bool) -> Holds | None:
    """Sum the parts in each hold; None where one of them was not measured."""
    holds = [holds_of(held, at, m, robust) for m in SUMMED.values()]
    known = [part for part in holds if part is not None]
    if len(known) < len(holds) or len({len(part.values) for part in known}) > 1:
        return None
    total = np.sum([part.values for part in known], axis=0)
    return Holds(**(vars(known[0]) | {"values": total}))
