# SPDX-License-Identifier: Apache-2.0
"""What is estimated of each config of a run.

Each server process gives a value of its own. How much processes of one config differ is
pooled over the configs (lab/stats/processes.py), and an estimate is the mean over the
processes with an interval that holds that. The baseline and its twin are the same
thing, and so count as one config there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from lab.records.phases import Phase
from lab.stats.estimate import SEED, Estimate
from lab.stats.processes import (
    Repeats,
    Spread,
    between_spread,
    look_level,
    over_processes,
)
from lab.stats.slope import Cells, make_cells
from microbench.analysis.growth import Fall, Reset, falls, slope_by_repeat, steps_of
from microbench.analysis.levels import Level
from microbench.analysis.machine import metrics_here
from microbench.analysis.metrics import LEVELS, METRICS, PARTS, Metric
from microbench.analysis.parts import parts_by_repeat
from microbench.analysis.threads import NO_THREADS
from microbench.analysis.trials import LoadedTrial

Found = dict[str, Repeats | None]
Estimates = dict[str, Estimate | None]


@dataclass
class Measured:
    """The steps of a config's trials that went well, and what follows from them.

    `every` are all steps, `steps` the decode-only ones, `growth` all of the growth
    phase and `threads` the threads in it; `cells` are those of its decode-only steps.
    By metric: `slopes` in us per 1,000 cached blocks, `falls` in us per 1,000 blocks
    that a reset takes away (`resets`), and, of the metrics with a level, `p50` at the
    stated |cache|. `parts` are slopes, too (microbench.analysis.parts). `level` is None
    if the config has no steps there.
    """

    name: str
    every: pl.DataFrame
    steps: pl.DataFrame
    growth: pl.DataFrame
    threads: pl.DataFrame
    cells: Cells
    reset: Reset
    slope_repeats: Found
    resets: dict[str, Fall | None]
    part_repeats: Found
    slowness_share: dict[str, float]
    slopes: Estimates = field(default_factory=dict)
    falls: Estimates = field(default_factory=dict)
    parts: Estimates = field(default_factory=dict)
    level: Level | None = None
    p50: Estimates = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        """Those of which the config has any steps."""
        return [
            name
            for name, metric in METRICS.items()
            if steps_of(self.every, metric).height
        ]


def measure_all(
    by_config: Mapping[str, Sequence[LoadedTrial]],
    profile: Mapping[str, Any],
    alike: Sequence[str | None],
) -> dict[str, Measured]:
    """Every config that has steps, by name, with its growth; levels come later.

    `alike` are configs that are the same thing.
    """
    tables = {name: _steps(trials) for name, trials in by_config.items()}
    every = {name: table for name, table in tables.items() if table is not None}
    resets = {name: Reset(table) for name, table in every.items()}
    first_look = profile.get("repeats", max(map(len, by_config.values()), default=0))
    metrics = metrics_here(list(resets.values()), first_look)
    measured = {}
    for index, (name, trials) in enumerate(by_config.items()):
        if name in every:
            known = [t.threads for t in trials if t.threads is not None]
            threads = pl.concat([NO_THREADS, *known])
            seed = SEED + 1_000 * index
            measured[name] = _measure(
                name, every[name], threads, resets[name], metrics, seed
            )
    pool = Pool(alike, looks_of(profile))
    slopes = pool.estimates({n: one.slope_repeats for n, one in measured.items()})
    fallen = pool.estimates({n: _falls(one) for n, one in measured.items()})
    parts = pool.estimates({n: one.part_repeats for n, one in measured.items()})
    for name, one in measured.items():
        one.slopes, one.falls, one.parts = slopes[name], fallen[name], parts[name]
    return measured


def _steps(trials: Sequence[LoadedTrial]) -> pl.DataFrame | None:
    """All steps of a config; None if there are none."""
    tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
    return pl.concat(tables, how="diagonal", rechunk=False) if tables else None


def _measure(
    name: str,
    every: pl.DataFrame,
    threads: pl.DataFrame,
    reset: Reset,
    metrics: Mapping[str, Metric],
    seed: int,
) -> Measured:
    in_growth = pl.col("phase") == Phase.GROWTH
    growth, threads = every.filter(in_growth), threads.filter(in_growth)
    times = tuple(metric.time for metric in LEVELS.values())
    columns = ("repeat", "batch", "cache_blocks", *times)
    cells = make_cells(growth.filter("decode_only").select(columns), times)
    slopes = {
        metric: slope_by_repeat(growth, cells, told, seed)
        for metric, told in metrics.items()
    }
    return Measured(
        name=name,
        every=every,
        steps=every.filter("decode_only"),
        growth=growth,
        threads=threads,
        cells=cells,
        reset=reset,
        slope_repeats=slopes,
        resets=falls(reset, metrics, seed + 500),
        part_repeats=parts_by_repeat(growth, threads),
        slowness_share={part: metrics[part].slowness_share for part in PARTS},
    )


def _falls(one: Measured) -> Found:
    return {name: fall and fall.per_1k_blocks for name, fall in one.resets.items()}


def level_all(
    measured: Mapping[str, Measured],
    profile: Mapping[str, Any],
    alike: Sequence[str | None],
) -> None:
    """Fill in `p50` of the configs that have a level."""
    levels = {name: one.level for name, one in measured.items() if one.level}
    found = {
        name: {
            metric: level.middle_by_repeat(told, SEED + 10 * index)
            for metric, told in LEVELS.items()
        }
        for index, (name, level) in enumerate(levels.items())
    }
    for name, estimates in Pool(alike, looks_of(profile)).estimates(found).items():
        measured[name].p50 = estimates


def looks_of(profile: Mapping[str, Any]) -> int:
    """How often a run of `profile` may look at its verdicts; 1 in runs from before."""
    repeats = profile.get("repeats", 1)
    return 1 + max(profile.get("most_repeats", repeats) - max(repeats, 2), 0)


class Pool:
    """Estimates from server processes, the spread between these pooled over configs.

    Their intervals hold in 95 % of runs over all `looks`. A config that was decided was
    not measured again: its intervals stay what they were at that look, whatever the
    servers that other configs got later say of the spread.
    """

    def __init__(self, alike: Sequence[str | None], looks: int) -> None:
        self._alike = alike
        self._level = look_level(looks)

    def estimates(self, found: Mapping[str, Found]) -> dict[str, Estimates]:
        """By config and metric."""

        @functools.cache
        def spread(metric: str, servers: int) -> Spread:
            return self._spread(found, metric, servers)

        def estimate(metric: str, repeats: Repeats, seed: int) -> Estimate:
            servers = max(len(repeats.values), 2)
            return self._estimate(repeats, spread(metric, servers), seed)

        return {
            name: {
                metric: repeats and estimate(metric, repeats, seed)
                for seed, (metric, repeats) in enumerate(of.items(), 100 * index)
            }
            for index, (name, of) in enumerate(found.items())
        }

    def _spread(self, found: Mapping[str, Found], metric: str, servers: int) -> Spread:
        """What the first `servers` of each config differ by."""
        there = {
            name: repeats.first(servers)
            for name, of in found.items()
            if (repeats := of.get(metric))
        }
        same = [there.pop(name) for name in self._alike if name in there]
        return between_spread([*there.values(), *([_joined(same)] if same else [])])

    def _estimate(self, repeats: Repeats, spread: Spread, seed: int) -> Estimate:
        estimate = over_processes(repeats, spread, SEED + seed)
        low, high = estimate.ci95
        wide_low, wide_high = estimate.interval(self._level)
        wider = (wide_high - wide_low) / (high - low) if high > low else 1.0
        value = estimate.value
        return Estimate(value, value + wider * (estimate.draws - value))


def _joined(same: Sequence[Repeats]) -> Repeats:
    """The repeats of configs that are the same thing, as one config's."""
    scale = float(np.mean([repeats.scale for repeats in same]))
    values = np.concatenate([repeats.values for repeats in same])
    variances = np.concatenate([repeats.variances for repeats in same])
    return Repeats(values, variances, scale)
