# SPDX-License-Identifier: Apache-2.0
"""Sums over the steps of a life, made in one pass that keeps no step.

Counts, sums and the most are exact. A quantile is that of all steps within 0.4 %: times
are counted in the buckets of floats with 7 binary digits. Stretches of neighbouring
steps keep the order of time, for slopes and pictures.

A step that takes over a hundred times the median is a compilation, a warm-up or a
machine that stood still. Such long steps are counted, and are in no mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvtax.stats.distribution import Floats, Ints
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
# Times of steps in us, and whether each step counts.
Times = NDArray[np.float32]
Flags = NDArray[np.bool_]


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
    _with_worker: dict[str, Ints] = field(default_factory=dict)
    _without_worker: dict[str, Ints] = field(default_factory=dict)
    _groups: list[pl.DataFrame] = field(default_factory=list)
    _populations: dict[bool, Population] = field(default_factory=dict)
    _stretches: list[pl.DataFrame] = field(default_factory=list)

    def add(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Add steps, and mark the `is_long` ones among them."""
        if not steps.height:
            return steps.with_columns(pl.lit(value=False).alias("is_long"))
        steps = steps.rechunk()
        if not self.steps:
            self.begin_ns = int(steps["t_ns"][0])
        self.end_ns = max(self.end_ns, int(steps["end_ns"].to_numpy().max()))
        times = _times(steps)
        columns = steps.select(pl.col(times).cast(pl.Float32).fill_null(0.0))
        us = dict(zip(times, columns.to_numpy().T, strict=True))
        has_worker = steps["execute_model_us"].is_not_null().to_numpy()
        self._count(us, has_worker)
        # A bucket is narrower than the time by which a long step is longer.
        limit_us = LONG * self.quantile("step_us", 0.5)
        marked = steps.with_columns((pl.col("step_us") > limit_us).alias("is_long"))
        is_short = ~marked["is_long"].to_numpy()
        self._note_long(marked.filter(~is_short))
        for of_worker in (True, False):
            self._add_sums(steps, [*us], is_short & (has_worker == of_worker))
        # Where no worker was recorded, all steps count.
        counts = is_short & (has_worker if has_worker.any() else ~has_worker)
        self._add_stretches(steps, us, counts)
        self.steps += steps.height
        free = steps["free_blocks"].max()
        if isinstance(free, int):
            self.most_free_blocks = max(self.most_free_blocks or 0, free)
        return marked

    def _count(self, us: Mapping[str, Times], has_worker: Flags) -> None:
        for counts, of in (
            (self._with_worker, has_worker),
            (self._without_worker, ~has_worker),
        ):
            is_whole = bool(of.all())
            for name, own in us.items() if of.any() else ():
                _add(counts, name, own if is_whole else own[of])
        for name, own in us.items():
            self.most_us[name] = max(self.most_us.get(name, 0.0), float(own.max()))

    def _note_long(self, steps: pl.DataFrame) -> None:
        self.long_steps += steps.height
        self.long_us += float(steps["step_us"].sum())
        rows = steps.top_k(NAMED, by="step_us").select("step_id", "t_ns", "step_us")
        named = [*self.longest, *map(LongStep._make, rows.iter_rows())]
        self.longest = sorted(named, key=lambda step: -step.us)[:NAMED]

    def _add_sums(
        self, steps: pl.DataFrame, times: Sequence[str], counts: Flags
    ) -> None:
        """Add sums over the steps that count, all with a worker's record or none."""
        some = steps if counts.all() else steps.filter(counts)
        if not some.height:
            return
        calls = [name for name in steps.columns if name.endswith(CALLS)]
        columns = [*times, *calls, "alone_us", "followed_us", "scheduled"]
        self._groups.append(
            some.select(
                pl.col("execute_model_us").is_not_null().first().alias("has_worker"),
                pl.len().alias("steps"),
                *(pl.col(name).cast(pl.Float64).sum() for name in columns),
                *(
                    pl.col(name).count().alias(f"known.{name}")
                    for name in ("connector_us", "scheduled", "cache_size")
                ),
            )
        )
        self._populations.clear()
        if len(self._groups) > NAMED:
            self._groups = [_summed(self._groups)]

    def _add_stretches(
        self, steps: pl.DataFrame, us: Mapping[str, Times], counts: Flags
    ) -> None:
        """Add a row per stretch: sums over the steps that count, means over all."""
        size = SHORT_STRETCH if self.steps < FEW_STEPS else STRETCH
        starts = np.arange(0, steps.height, size)
        slowest = starts + _rows_of(us["step_us"], size).argmax(axis=1)
        ends = np.append(starts[1:], steps.height)
        columns: dict[str, NDArray[Any]] = {
            "t_ns": steps["t_ns"].to_numpy()[starts],
            "end_ns": np.maximum.reduceat(steps["end_ns"].to_numpy(), starts),
            "steps": ends - starts,
            "weight": _sums(counts, starts),
        }
        for name, own in us.items():
            counted = own if counts.all() else np.where(counts, own, 0)
            columns[f"{SUMS}{name}"] = _sums(counted, starts)
        columns |= {name: _means(steps[name], starts) for name in GAUGES}
        columns["slowest.step_id"] = steps["step_id"].to_numpy()[slowest]
        columns |= {f"slowest.{name}": own[slowest] for name, own in us.items()}
        self._stretches.append(
            pl.DataFrame(
                [
                    # What is not known of a gauge is NaN.
                    pl.Series(name, of, nan_to_null=name in GAUGES)
                    for name, of in columns.items()
                ]
            )
        )
        if len(self._stretches) > STRETCH:
            self._stretches = [pl.concat(self._stretches, how="diagonal")]

    @property
    def has_worker(self) -> bool:
        """Return whether any step has a worker's record."""
        return self._population(of_worker=True).steps > 0

    @property
    def methods(self) -> list[str]:
        """The columns of the connector's methods."""
        return method_columns(pl.DataFrame(schema=dict.fromkeys(self.most_us, pl.Null)))

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
        """Sum up the steps so far, once until more are added."""
        if of_worker not in self._populations:
            self._populations[of_worker] = self._sum_up(of_worker=of_worker)
        return self._populations[of_worker]

    def _sum_up(self, *, of_worker: bool) -> Population:
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
        counted = [self._with_worker]
        if column.startswith(OF_THE_ENGINE) or not self.has_worker:
            counted.append(self._without_worker)
        nothing = np.zeros(BUCKETS, int)
        below = np.cumsum(np.sum([of.get(column, nothing) for of in counted], axis=0))
        # Where a method was not called at all, it has no column.
        below += sum(int(of["step_us"].sum()) for of in counted if of) - below[-1]
        rank = int((below[-1] - 1) * share + 0.5)
        bucket = int(np.searchsorted(below, rank, side="right"))
        return _middle_us(bucket)

    @property
    def stretches(self) -> pl.DataFrame:
        """A row per stretch of steps: `sum.TIME`, GAUGES, and its `slowest` step."""
        return pl.concat(self._stretches, how="diagonal")


def _add(counts: dict[str, Ints], column: str, us: Times) -> None:
    """Count times by bucket; most methods are called in few steps."""
    of_column = counts.setdefault(column, np.zeros(BUCKETS, int))
    longer = us[us > 0]
    added = np.bincount(longer.view(np.int32) >> BITS)
    of_column[: len(added)] += added
    of_column[0] += len(us) - len(longer)


def _rows_of(us: Times, size: int) -> Times:
    """Lay out times in rows of `size`, the last one filled up."""
    return np.pad(us, (0, -len(us) % size), constant_values=-1).reshape(-1, size)


def _sums(values: Any, starts: Ints) -> Floats:
    """Sum up stretches that begin at `starts`."""
    return np.add.reduceat(values, starts, dtype=float)


def _means(values: pl.Series, starts: Ints) -> Floats:
    """Compute the means of stretches, NaN where nothing is known."""
    known = np.diff(starts, append=len(values)).astype(float)
    if values.null_count():
        known = _sums(values.is_not_null().to_numpy(), starts)
        values = values.fill_null(0)
    unknown = np.full(len(starts), np.nan)
    sums = _sums(values.to_numpy(), starts)
    return np.asarray(np.divide(sums, known, out=unknown, where=known > 0), float)


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
