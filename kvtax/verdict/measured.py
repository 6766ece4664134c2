# SPDX-License-Identifier: Apache-2.0
"""Estimates of each config of a run, from the levels at which |cache| was held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import RareSteps
from kvtax.records.profile import Ladder, ProfileRecord
from kvtax.records.requests import Phase
from kvtax.stats.distribution import SEED, Distribution, Floats
from kvtax.stats.held import Fit, fit
from kvtax.stats.median_slope import Cells, make_cells, slope_us_per_1k_blocks
from kvtax.stats.processes import RunSpread, look_level, student
from kvtax.steps.trial_steps import NO_CPU
from kvtax.verdict.holds import held_steps, holds_of, holds_of_cpu
from kvtax.verdict.levels import Level
from kvtax.verdict.metrics import (
    LEVELS,
    METRICS,
    OF_CPU,
    PREFILL,
    THREADS,
    TIMED,
    TIMED_MANY,
)
from kvtax.verdict.rare import rare_steps
from kvtax.verdict.trials import LoadedTrial


@dataclass
class ConfigEstimates:
    """Steps of a config's good trials, and the estimates from them.

    `every` are all steps, `steps` the decode-only ones, `held` those of the holds;
    `cpu` is that of kvtax.steps.trial_steps. `cells` are of the growth phase, as are
    `growth_slopes`, of `schedule` and `overhead`. `level` is None if the config has no
    steps there. `fits` are by metric, `slopes` in us per 1,000 cached blocks; `p50` are
    the logs of the medians at the stated |cache|, by metric and server.
    """

    name: str
    every: pl.DataFrame
    held: pl.DataFrame
    cpu: pl.DataFrame
    cells: Cells
    level: Level | None
    rare: RareSteps | None
    fits: dict[str, Fit] = field(default_factory=dict)
    slopes: dict[str, Distribution] = field(default_factory=dict)
    p50: dict[str, Floats] = field(default_factory=dict)
    growth_slopes: dict[str, Distribution | None] = field(default_factory=dict)

    @property
    def steps(self) -> pl.DataFrame:
        return self.every.filter("decode_only")


def measure_all(
    by_config: Mapping[str, Sequence[LoadedTrial]], profile: ProfileRecord
) -> dict[str, ConfigEstimates]:
    """Measure every config that has steps, by name."""
    measured = {}
    for index, (name, trials) in enumerate(by_config.items()):
        tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
        if tables:
            every = pl.concat(tables, how="diagonal", rechunk=False)
            cpu = pl.concat([NO_CPU, *(t.cpu for t in trials if t.cpu is not None)])
            seed = SEED + 1_000 * index
            measured[name] = _measure(name, every, cpu, profile, seed)
    return measured


def _measure(
    name: str, every: pl.DataFrame, cpu: pl.DataFrame, profile: ProfileRecord, seed: int
) -> ConfigEstimates:
    ladder = profile.load.ladder
    times = tuple(metric.time for metric in LEVELS.values())
    in_growth = every.filter("decode_only", pl.col("phase") == Phase.GROWTH)
    columns = ("repeat", "batch", "cache_blocks", *times)
    held = held_steps(every, ladder)
    one = ConfigEstimates(
        name=name,
        every=every,
        held=held,
        cpu=cpu,
        cells=make_cells(in_growth.select(columns), times),
        level=Level.of(held.filter(~pl.col("many")), ladder.stated_level),
        rare=rare_steps(held),
        fits=fits_of(held, cpu),
    )
    one.growth_slopes = {
        metric: slope_us_per_1k_blocks(one.cells, LEVELS[metric].time)
        for metric in ("schedule", "overhead")
    }
    if one.level:
        one.p50 = {
            name: one.level.log_of_servers(metric.time)
            for name, metric in LEVELS.items()
        }
    wide = look_level(profile.looks)
    for place, (metric, found) in enumerate(one.fits.items()):
        one.slopes[metric] = slope_of(found, wide, seed + place)
    return one


def slope_of(found: Fit, level: float, seed: int = SEED) -> Distribution:
    """Return the slope in us per 1,000 blocks, known in `level` of runs."""
    slope, error = found.slope()
    return student(slope, error, found.df, seed, level)


def fits_of(held: pl.DataFrame, cpu: pl.DataFrame) -> dict[str, Fit]:
    """Fit the levels of every metric that was measured; see ConfigEstimates."""
    holds = {name: holds_of(held, metric) for name, metric in METRICS.items()}
    holds |= {name: holds_of_cpu(held, cpu, name) for name in OF_CPU}
    fits = {name: fit(one) for name, one in holds.items() if one is not None}
    return {name: found for name, found in fits.items() if found is not None}


def promised_metrics(one: ConfigEstimates, ladder: Ladder, reads_cpu: bool) -> set[str]:
    """List the metrics that a run must have measured of a config.

    `reads_cpu` is whether its driver read CPU times.
    """
    with_calls = one.held["connector_us"].null_count() < one.held.height
    return {
        TIMED,
        *([TIMED_MANY] if ladder.many_decoders else []),
        *([PREFILL] if with_calls else []),
        *([THREADS] if reads_cpu else []),
    }


class Comparison:
    """Compares the medians of configs, by how much servers of one config differ."""

    def __init__(self, measured: Mapping[str, ConfigEstimates]) -> None:
        self._of = {name: one.p50 for name, one in measured.items()}
        self._spread = {
            metric: RunSpread.of(
                p50[metric] for p50 in self._of.values() if metric in p50
            )
            for metric in LEVELS
        }

    def __contains__(self, name: str) -> bool:
        """Return whether the config was measured."""
        return name in self._of

    def ratio(self, name: str, other: str, metric: str) -> Estimate | None:
        """Estimate the ratio of two configs; None where one is not known.

        Without two servers of some config it has no interval.
        """
        ours, theirs = (self._of[one].get(metric) for one in (name, other))
        if ours is None or theirs is None or not len(ours) or not len(theirs):
            return None
        log = float(ours.mean() - theirs.mean())
        if (spread := self._spread[metric]) is None:
            return Estimate(round(float(np.exp(log)), 3), None)
        reach = spread.reach(len(ours), len(theirs))
        low, value, high = np.exp([log - reach, log, log + reach]).round(3).tolist()
        return Estimate(value, (low, high))

    def difference_us(self, name: str, other: str, metric: str) -> Estimate | None:
        """Estimate by how many us `name` lies above `other`, as in `ratio`."""
        if (ratio := self.ratio(name, other, metric)) is None:
            return None
        base_us = float(np.exp(self._of[other][metric].mean()))
        us = float(np.exp(self._of[name][metric].mean())) - base_us
        if ratio.ci95 is None:
            return Estimate(round(us, 3), None)
        low, high = (round(base_us * (times - 1), 3) for times in ratio.ci95)
        return Estimate(round(us, 3), (low, high))
