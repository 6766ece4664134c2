# SPDX-License-Identifier: Apache-2.0
"""Sums over the steps of a life, made in one pass that keeps no step.

Counts, sums and the most are exact. A quantile is that of all steps within 0.4 %: times
are counted in the buckets of floats with 7 binary digits. Stretches of neighbouring
steps keep the order of time, for slopes and pictures.

A step that takes over a hundred times the median is a compilation, a warm-up or a
machine that stood still. Such long steps are counted, and are in no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.stats.distribution import Ints, as_float
from kvtax.steps.parts import CALLS, STEP_PARTS, method_columns

# Bits of a float of 32 that its bucket leaves out.
BITS = 16
BUCKETS = 1 << (31 - BITS)
# A step of over so many medians is a long one.
LONG = 100
# Steps in a stretch: few while there are few steps, as pictures need points.
SHORT_STRETCH, STRETCH = 10, 50
FEW_STEPS = 100_000
# The longest steps are kept by name.
NAMED = 3
# Covariates and gauges, of which a stretch has the means.
GAUGES = ("cache_size", "free_blocks", "running", "waiting", "prefill_tokens")
# Columns of what the engine's process does, which is known of each step.
OF_THE_ENGINE = ("step_us", "scheduler")
SUMS = "sum."


class LongStep(NamedTuple):
    """A step that is in no mean: its number, when it began, and how long it took."""

    step_id: int
    t_ns: int
    us: float


class Population(NamedTuple):
    """Sums over some steps: how many, the time alone, and us and calls by column."""

    steps: int
    alone_us: float
    sums: dict[str, float]

    def mean(self, column: str) -> float:
        return self.sums.get(column, 0.0) / self.steps if self.steps else 0.0


@dataclass
class StepDigest:
    """Sums of the steps that were added, in order of time."""

    steps: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    long_steps: int = 0
    long_us: float = 0.0
    longest: list[LongStep] = field(default_factory=list)
    most_us: dict[str, float] = field(default_factory=dict)
    most_free_blocks: int | None = None
    _counts: dict[str, Ints] = field(default_factory=dict)
    _of_worker: dict[str, Ints] = field(default_factory=dict)
    _groups: list[pl.DataFrame] = field(default_factory=list)
    _stretches: list[pl.DataFrame] = field(default_factory=list)

    def add(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Add steps, and mark the `is_long` ones among them."""
        if not steps.height:
            return steps.with_columns(pl.lit(value=False).alias("is_long"))
        if not self.steps:
            self.begin_ns = int(steps["t_ns"][0])
        self.end_ns = max(self.end_ns, int(as_float(steps["end_ns"].max())))
        times = _times(steps)
        self._count(steps, times)
        # A bucket is narrower than the time by which a long step is longer.
        limit_us = LONG * self.quantile("step_us", 0.5)
        marked = steps.with_columns((pl.col("step_us") > limit_us).alias("is_long"))
        self._note_long(marked.filter("is_long"))
        self._add_sums(marked, times)
        self._add_stretches(marked, times)
        self.steps += steps.height
        free = steps["free_blocks"].max()
        if isinstance(free, int):
            self.most_free_blocks = max(self.most_free_blocks or 0, free)
        return marked

    def _count(self, steps: pl.DataFrame, times: Sequence[str]) -> None:
        has_worker = steps["execute_model_us"].is_not_null().to_numpy()
        is_whole = bool(has_worker.all())
        for us in steps.select(pl.col(times).cast(pl.Float32).fill_null(0.0)):
            buckets = np.maximum(us.to_numpy(), 0).view(np.int32) >> BITS
            added = np.bincount(buckets, minlength=BUCKETS)
            _add(self._counts, us.name, added)
            if not is_whole:
                added = np.bincount(buckets[has_worker], minlength=BUCKETS)
            _add(self._of_worker, us.name, added)
            most_us = as_float(us.max())
            self.most_us[us.name] = max(self.most_us.get(us.name, 0.0), most_us)

    def _note_long(self, steps: pl.DataFrame) -> None:
        self.long_steps += steps.height
        self.long_us += as_float(steps["step_us"].sum())
        rows = steps.top_k(NAMED, by="step_us").select("step_id", "t_ns", "step_us")
        named = [*self.longest, *map(LongStep._make, rows.iter_rows())]
        self.longest = sorted(named, key=lambda step: -step.us)[:NAMED]

    def _add_sums(self, steps: pl.DataFrame, times: Sequence[str]) -> None:
        calls = [name for name in steps.columns if name.endswith(CALLS)]
        columns = [*times, *calls, "alone_us", "followed_us", "scheduled"]
        self._groups.append(
            steps.filter(~pl.col("is_long"))
            .group_by(pl.col("execute_model_us").is_not_null().alias("has_worker"))
            .agg(
                pl.len().alias("steps"),
                *(pl.col(name).cast(pl.Float64).sum() for name in columns),
                *(
                    pl.col(name).count().alias(f"known.{name}")
                    for name in ("connector_us", "scheduled", "cache_size")
                ),
            )
        )
        if len(self._groups) > NAMED:
            self._groups = [_summed(self._groups)]

    def _add_stretches(self, steps: pl.DataFrame, times: Sequence[str]) -> None:
        size = SHORT_STRETCH if self.steps < FEW_STEPS else STRETCH
        slowest = ("step_id", *times)
        short = ~pl.col("is_long")
        by_worker = short & pl.col("has_worker")
        marked = steps.with_columns(
            (
                pl.col("execute_model_us").is_not_null()
                | pl.lit(steps["execute_model_us"].null_count() == steps.height)
            ).alias("has_worker")
        )
        stretches = (
            marked.with_row_index("row")
            .group_by(
                (pl.int_range(pl.len()) // size).alias("stretch"), maintain_order=True
            )
            .agg(
                pl.col("t_ns").first(),
                pl.col("end_ns").max(),
                pl.len().alias("steps"),
                by_worker.sum().alias("weight"),
                *(
                    pl.col(name)
                    .filter(by_worker)
                    .cast(pl.Float64)
                    .sum()
                    .alias(f"{SUMS}{name}")
                    for name in times
                ),
                *(pl.col(name).mean() for name in GAUGES),
                pl.col("row").get(pl.col("step_us").arg_max()),
            )
            .drop("stretch")
        )
        rows = marked.select(slowest)[stretches["row"]]
        named = rows.select(pl.all().name.prefix("slowest."))
        self._stretches.append(stretches.drop("row").hstack(named))
        if len(self._stretches) > STRETCH:
            self._stretches = [pl.concat(self._stretches, how="diagonal")]

    @property
    def has_worker(self) -> bool:
        """Return whether any step has a worker's record."""
        return self._population(of_worker=True).steps > 0

    @property
    def methods(self) -> list[str]:
        """The columns of the connector's methods."""
        return method_columns(pl.DataFrame(schema=dict.fromkeys(self._counts, pl.Null)))

    @property
    def all(self) -> Population:
        """All steps but the long ones."""
        return self._population(of_worker=False)

    @property
    def with_worker(self) -> Population:
        """Steps that have a worker's record; all steps where none has."""
        return self._population(of_worker=self.has_worker)

    def of(self, column: str) -> Population:
        """Return the steps of which the column is known."""
        return self.all if column.startswith(OF_THE_ENGINE) else self.with_worker

    def _population(self, *, of_worker: bool) -> Population:
        if not self._groups:
            return Population(0, 0.0, {})
        groups = _summed(self._groups)
        if of_worker:
            groups = groups.filter("has_worker")
        sums = groups.drop("has_worker").sum().row(0, named=True)
        return Population(
            int(sums["steps"] or 0),
            float(sums["alone_us"] or 0),
            {name: float(value or 0) for name, value in sums.items()},
        )

    @property
    def alone_share(self) -> float:
        """The share of a step's time in which no later step runs."""
        population = self.all
        followed_us = population.sums.get("followed_us", 0.0)
        return population.alone_us / followed_us if followed_us else 1.0

    @property
    def covered_us(self) -> float:
        """Time in which steps ran, the long ones aside: that of overlaps once."""
        return self.all.sums.get("step_us", 0.0) * self.alone_share

    def knows(self, column: str) -> bool:
        """Decide whether any step has the column."""
        return bool(self.all.sums.get(f"known.{column}"))

    def quantile(self, column: str, share: float) -> float:
        """Compute a quantile in us over all steps, the long ones among them."""
        in_worker = self.has_worker and not column.startswith(OF_THE_ENGINE)
        counts = (self._of_worker if in_worker else self._counts)[column]
        below = np.cumsum(counts)
        rank = int((below[-1] - 1) * share + 0.5)
        bucket = int(np.searchsorted(below, rank, side="right"))
        return _middle_us(bucket)

    @property
    def stretches(self) -> pl.DataFrame:
        """A row per stretch of steps: `sum.TIME`, GAUGES, and its `slowest` step."""
        return pl.concat(self._stretches, how="diagonal")


def _add(counts: dict[str, Ints], column: str, added: Ints) -> None:
    counts[column] = counts[column] + added if column in counts else added


def _times(steps: pl.DataFrame) -> list[str]:
    return ["step_us", *STEP_PARTS, *method_columns(steps)]


def _summed(groups: Sequence[pl.DataFrame]) -> pl.DataFrame:
    together = pl.concat(groups, how="diagonal")
    return together.group_by("has_worker").agg(pl.all().sum())


def _middle_us(bucket: int) -> float:
    if not bucket:
        return 0.0
    edges = np.array([bucket << BITS, bucket + 1 << BITS], np.int32)
    return float(edges.view(np.float32).astype(float).mean())
