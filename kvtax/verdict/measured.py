# SPDX-License-Identifier: Apache-2.0
"""Estimates of each config of a run, from the levels at which |cache| was held.

Configs are compared at the stated |cache|, the highest level that is held below a full
cache. Batch sizes are alike in every config: as many requests decode in each hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import RareSteps
from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.stats.distribution import SEED, Distribution, Floats, rounded
from kvtax.stats.held import Fit, fit
from kvtax.stats.median_slope import Cells, make_cells, slope_us_per_1k_blocks
from kvtax.stats.processes import RunSpread, look_level, student
from kvtax.steps.parts import attributed
from kvtax.steps.trial_steps import NO_CPU, STEP_TIMES
from kvtax.verdict.holds import as_holds, held_steps, rare_steps
from kvtax.verdict.metrics import (
    JUDGED,
    LEVELS,
    PREFILL,
    THREADS,
    TIMED,
    TIMED_MANY,
    TPOT,
    number,
)
from kvtax.verdict.trials import LoadedTrial

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Quantiles of 100,000 steps are as good as of millions; every k-th step is kept.
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Level:
    """Decode-only steps of one config at the stated |cache|."""

    steps: pl.DataFrame

    @classmethod
    def of(cls, held: pl.DataFrame, level: int) -> Level | None:
        """Select the steps of a level from those that are held; None without any."""
        own = held.filter("decode_only", pl.col("level") == level)
        return cls(thin(own, MAX_STEPS)) if own.height else None

    @property
    def cache_blocks(self) -> int:
        return round(number(self.steps["cache_blocks"].median()))

    def quantiles(self, time: str) -> dict[str, float] | None:
        """p50, p90, p99 of `time` in us, None where it was not measured."""
        values = self.steps[time].drop_nulls()
        if not len(values):
            return None
        return {
            name: round(number(values.quantile(q, "higher")), 3)
            for name, q in QUANTILES.items()
        }

    def log_of_servers(self, time: str) -> Floats:
        """Return the log of each server's median of `time` in us: (servers,)."""
        of_servers = (
            self.steps.group_by("repeat").agg(pl.col(time).median()).sort("repeat")
        )
        known = of_servers[time].drop_nulls().cast(pl.Float64).to_numpy()
        return np.asarray(np.log(known[known > 0]), float)

    def attribution_us(self) -> dict[str, float | None]:
        """Mean parts of the middle half of the steps, which sum to their step time.

        The mean over the steps whose step_us lies between its 25th and 75th
        percentile (interquartile mean): means add up, and the tails are out.
        """
        whole = self.steps
        if whole["execute_model_us"].null_count() < whole.height:
            whole = whole.filter(pl.col("execute_model_us").is_not_null())
        low, high = (whole["step_us"].quantile(q, "higher") for q in (0.25, 0.75))
        middle = whole.filter(pl.col("step_us").is_between(low, high))

        def mean(name: str) -> float | None:
            values = middle[name].cast(pl.Float64)
            if values.null_count() == len(values):
                return None
            return number(values.fill_null(0).mean())

        means = {name: mean(name) for name in STEP_TIMES}
        return attributed(means)


def thin(steps: pl.DataFrame, most: int) -> pl.DataFrame:
    """Every k-th step, so that at most `most` are left."""
    every = -(-steps.height // most) if steps.height else 1
    return steps if every == 1 else steps.gather_every(every)


@dataclass(frozen=True)
class ConfigSteps:
    """Steps of a config's good trials.

    `every` are all steps, `held` those of the holds; `cpu` is that of
    kvtax.steps.trial_steps. `cells` are of the growth phase. `level` is None if the
    config has no steps there.
    """

    every: pl.DataFrame
    held: pl.DataFrame
    cpu: pl.DataFrame
    cells: Cells
    level: Level | None

    @property
    def decodes(self) -> pl.DataFrame:
        """Return the decode-only steps."""
        return self.every.filter("decode_only")

    def log_p50(self) -> dict[str, list[float]]:
        """Compute the log of each server's median at the stated |cache|, by metric."""
        if self.level is None:
            return {}
        return {
            name: self.level.log_of_servers(metric.time).round(6).tolist()
            for name, metric in LEVELS.items()
        }

    def growth_slopes(self) -> dict[str, Estimate | None]:
        """Estimate the slopes in growth, in us per 1,000 blocks, by metric."""
        return {
            name: rounded(slope_us_per_1k_blocks(self.cells, LEVELS[name].time))
            for name in ("schedule", "overhead")
        }


@dataclass(frozen=True)
class ConfigEstimates:
    """Estimates of a config from its holds.

    `fits` are by metric, `slopes` in us per 1,000 cached blocks.
    """

    fits: dict[str, Fit]
    slopes: dict[str, Distribution]
    rare: RareSteps | None


def steps_of_all(
    by_config: Mapping[str, Sequence[LoadedTrial]], ladder: Ladder
) -> dict[str, ConfigSteps]:
    """Put the steps of every config together that has any, by name."""
    found = {}
    for name, trials in by_config.items():
        tables = [t.steps for t in trials if t.steps is not None and t.steps.height]
        if tables:
            every = pl.concat(tables, how="diagonal", rechunk=False)
            cpu = pl.concat([NO_CPU, *(t.cpu for t in trials if t.cpu is not None)])
            found[name] = _steps(every, cpu, ladder)
    return found


def _steps(every: pl.DataFrame, cpu: pl.DataFrame, ladder: Ladder) -> ConfigSteps:
    times = tuple(metric.time for metric in LEVELS.values())
    in_growth = every.filter("decode_only", pl.col("phase") == Phase.GROWTH)
    columns = ("repeat", "batch", "cache_blocks", *times)
    held = held_steps(every, ladder)
    return ConfigSteps(
        every=every,
        held=held,
        cpu=cpu,
        cells=make_cells(in_growth.select(columns), times),
        level=Level.of(held.filter(~pl.col("many")), ladder.stated_level),
    )


def estimate_all(
    holds: Mapping[str, pl.DataFrame], looks: int
) -> dict[str, ConfigEstimates]:
    """Fit the levels of every metric of every config's table of holds."""
    wide, found = look_level(looks), {}
    for index, (name, table) in enumerate(holds.items()):
        seed = SEED + 1_000 * index
        fits = fits_of(table)
        slopes = {
            metric: slope_of(one, wide, seed + place)
            for place, (metric, one) in enumerate(fits.items())
        }
        found[name] = ConfigEstimates(fits, slopes, rare_steps(table))
    return found


def slope_of(found: Fit, level: float, seed: int = SEED) -> Distribution:
    """Return the slope in us per 1,000 blocks, known in `level` of runs."""
    slope, error = found.slope()
    return student(slope, error, found.df, seed, level)


def fits_of(holds: pl.DataFrame) -> dict[str, Fit]:
    """Fit the levels of every metric of a table of holds that has them."""
    known = {name: as_holds(holds, name) for name in JUDGED}
    fits = {name: fit(one) for name, one in known.items() if one is not None}
    return {name: found for name, found in fits.items() if found is not None}


def promised_metrics(with_calls: bool, ladder: Ladder, reads_cpu: bool) -> set[str]:
    """List the metrics that a run must have measured of a config.

    `with_calls` is whether its connector's calls were timed, `reads_cpu` whether the
    run's driver read CPU times.
    """
    return {
        TIMED,
        *([TIMED_MANY] if ladder.many_decoders else []),
        *([PREFILL] if with_calls else []),
        *([THREADS] if reads_cpu else []),
    }


class Comparison:
    """Compares the medians of configs, by how much servers of one config differ."""

    def __init__(self, log_p50: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Compare by the logs of each server's median, by config and metric."""
        self._of = {
            name: {metric: np.array(logs) for metric, logs in of.items()}
            for name, of in log_p50.items()
        }
        self._spread = {
            metric: RunSpread.of(
                p50[metric] for p50 in self._of.values() if metric in p50
            )
            for metric in (*LEVELS, TPOT)
        }

    def __contains__(self, name: str) -> bool:
        """Return whether the config was measured."""
        return name in self._of

    def median_us(self, name: str, metric: str) -> float | None:
        """Return the geometric mean of the medians of a config's servers, in us."""
        logs = self._of.get(name, {}).get(metric)
        return None if logs is None or not len(logs) else float(np.exp(logs.mean()))

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
