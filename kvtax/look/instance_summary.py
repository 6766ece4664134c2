# SPDX-License-Identifier: Apache-2.0
"""Summary of one instance, shared by terminal and page: costs, covariates, requests.

A server's own traffic is no experiment: |cache|, running requests and context rise and
fall together. So all covariates are fitted at once, on means over blocks of
neighbouring steps, time among them, and a covariate that hardly moved, went one way
only, or moved together with another, is reported as unknown. A slope shows that the
cost moved with it, not that it is the reason: `kvtax sweep` measures that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from kvtax.look.clients import outside
from kvtax.look.digest import STRETCH, SUMS, StepDigest
from kvtax.look.instances import Instance
from kvtax.report.document import Cell
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats, share_of, t_quantile
from kvtax.stats.least_squares import (
    STRETCHES,
    jackknifed_slopes,
    share_explained_by_others,
)
from kvtax.stats.quantiles import quantile
from kvtax.steps.parts import STEP_PARTS

# Mean step over the time between two ends from which steps are called overlapping.
MOST_ALONE = 1.05
# Correlation with the other axes above which two cannot be told apart: a variance
# inflation of 10 (Marquardt 1970).
MOST_EXPLAINED = 0.9
# Ways from the lowest to the highest quarter of its range, or back, that an axis must
# have gone. What went one way is confounded with time: a machine that slows down, or
# has spells, then looks like a cost. See test_slopes_of_nothing.
FEWEST_SWINGS = 3


@dataclass(frozen=True)
class Covariate:
    """A covariate of costs, and the units of its slope."""

    column: str
    per: float
    unit: str
    least_range: float


COVARIATES = {
    "cache": Covariate("cache_size", 1_000, "1,000 cached blocks", 500),
    "running": Covariate("running", 1, "running request", 3),
    "context": Covariate("used_blocks", 1_000, "1,000 blocks in use", 500),
    "prefill": Covariate("prefill_tokens", 1_000, "1,000 prompt tokens", 100),
}


# Slope in us per step by axis, or why it is not known.
Slopes = dict[str, Estimate | str]


def moves(digest: StepDigest, times: Sequence[str]) -> dict[str, Slopes]:
    """For each of the columns `times`: the slope of its mean along each axis."""
    if not digest.steps:
        return {}
    blocks = _blocks(digest, times)
    unknown = _unmoved(blocks)
    axes = {name: axis for name, axis in COVARIATES.items() if name not in unknown}
    if not axes or not times:
        return {time: {**unknown} for time in times}
    columns = [blocks[axis.column].to_numpy() / axis.per for axis in axes.values()]
    matrix = np.stack([*columns, np.linspace(0, 1, blocks.height)], axis=1)
    together = share_explained_by_others(matrix) > MOST_EXPLAINED
    for name in np.array([*axes])[together[:-1]]:
        unknown[name] = "it moved together with the others"
    by_time = {}
    for time, slopes in zip(
        times, jackknifed_slopes(matrix, blocks.select(times).to_numpy()), strict=True
    ):
        known = dict(zip(axes, slopes[:-1], strict=True)) | unknown
        by_time[time] = {name: known[name] for name in COVARIATES}
    return by_time


def _blocks(digest: StepDigest, times: Sequence[str]) -> pl.DataFrame:
    """Means over blocks of neighbouring steps that have a worker's record."""
    most = digest.most_free_blocks
    weight = pl.col("weight").cast(pl.Float64)
    axes = ("cache_size", "running", "used_blocks", "prefill_tokens")
    block = (pl.col("weight").cum_sum() - 1) // STRETCH
    return (
        digest.stretches.filter(pl.col("weight") > 0)
        .with_columns((pl.lit(most) - pl.col("free_blocks")).alias("used_blocks"))
        .group_by(block.alias("block"), maintain_order=True)
        .agg(
            *(
                (pl.col(f"{SUMS}{time}").fill_null(0).sum() / weight.sum()).alias(time)
                for time in times
            ),
            *((pl.col(axis) * weight).sum() / weight.sum() for axis in axes),
            *(pl.col(axis).null_count().alias(f"unknown.{axis}") for axis in axes),
        )
        .with_columns(
            pl.when(pl.col(f"unknown.{axis}") == 0).then(pl.col(axis)).alias(axis)
            for axis in axes
        )
    )


def _swings(column: pl.Series, least_range: float) -> int | None:
    """Count the ways from low to high and back; None if the range is too small."""
    low, high = quantile(column, 0.05), quantile(column, 0.95)
    if low is None or high is None or high - low < least_range:
        return None
    quarter = (high - low) / 4
    values = column.to_numpy()
    side = np.where(values < low + quarter, -1, np.where(values > high - quarter, 1, 0))
    return int(np.count_nonzero(np.diff(side[side != 0])))


def _unmoved(blocks: pl.DataFrame) -> dict[str, str]:
    """Name the axes that say nothing about these blocks, and why."""
    if blocks.height < 2 * STRETCHES:
        return dict.fromkeys(
            COVARIATES, f"fewer than {2 * STRETCHES * STRETCH:,} steps"
        )
    why = {}
    for name, axis in COVARIATES.items():
        column = blocks[axis.column]
        if column.null_count():
            why[name] = "not recorded"
        elif (swings := _swings(column, axis.least_range)) is None:
            why[name] = "it hardly changed"
        elif swings < FEWEST_SWINGS:
            why[name] = "it hardly went up and down, so time may be the reason"
    return why


@dataclass(frozen=True)
class Part:
    """Times in us per step; `share` of the time in which steps ran.

    Mean and share are without the long steps, quantiles and the most of all steps.
    """

    name: str
    column: str
    calls_per_step: float | None
    mean_us: float
    p50_us: float
    p99_us: float
    most_us: float
    share: float


@dataclass(frozen=True)
class Cost:
    """Cost of one instance, the connector's among `parts` where it is known.

    A step ended every `period_us` while any ran: less than a step takes, where steps
    overlap. Model, connector, its methods in the worker and other are of the
    `worker_steps` that have a worker's record. `bar` splits their step into model,
    scheduler, connector and the rest, in us that add up to it. `at_start_us` and
    `between_us` are in no part (Instance).
    """

    steps: int
    worker_steps: int
    has_worker: bool
    seconds: float
    period_us: float
    step: Part
    parts: list[Part]
    methods: list[Part]
    bar: dict[str, float]
    at_start_us: dict[str, float]
    between_us: dict[str, float]

    def __post_init__(self) -> None:
        """Assert that no part is less than nothing, or more than the whole."""
        for part in (*self.parts, *self.methods):
            assert part.mean_us >= 0, part
            assert 0 <= part.share <= 1, part

    @property
    def connector(self) -> Part | None:
        return next((p for p in self.parts if p.column == "connector_us"), None)

    @property
    def connector_ms_per_s(self) -> float | None:
        return 1e3 * self.connector.share if self.connector else None

    @property
    def overlaps(self) -> bool:
        """Return whether steps overlap, as under asynchronous scheduling."""
        return self.step.mean_us >= MOST_ALONE * self.period_us

    @property
    def overlap(self) -> str:
        """Say in words how often steps ended; empty where they do not overlap."""
        ended = f"steps overlap, one ended every {self.period_us:,.0f} µs"
        return ended if self.overlaps else ""


def cost(instance: Instance) -> Cost | None:
    """Compute the cost, None without steps; the method that takes most comes first."""
    digest = instance.digest
    if not digest.all.steps:
        return None
    known = [n for n in STEP_PARTS if n != "connector_us" or digest.knows(n)]
    parts = [_part(digest, name) for name in known]
    # All time that is in no other part, as that of overlapping steps is in several.
    *others, rest = parts
    left = max(0.0, 1.0 - sum(part.share for part in others))
    return Cost(
        steps=digest.steps,
        worker_steps=digest.with_worker.steps,
        has_worker=digest.has_worker,
        seconds=(digest.end_ns - digest.begin_ns) / 1e9,
        period_us=(digest.covered_us or 1.0) / digest.all.steps,
        step=replace(_part(digest, "step_us"), share=1.0),
        parts=[*others, replace(rest, share=left, mean_us=max(rest.mean_us, 0.0))],
        methods=sorted(
            (_part(digest, name) for name in instance.methods),
            key=lambda part: -part.mean_us,
        ),
        bar=_bar(digest, known),
        at_start_us=instance.at_start_us,
        between_us=instance.between_us,
    )


def _bar(digest: StepDigest, known: Sequence[str]) -> dict[str, float]:
    """Split the mean step into us by name, which add up to it."""
    population = digest.with_worker
    bar = {STEP_PARTS[n]: population.mean(n) for n in known if n != "other_us"}
    left_us = max(population.mean("step_us") - sum(bar.values()), 0.0)
    return bar | {"the rest": left_us}


def _part(digest: StepDigest, column: str) -> Part:
    population = digest.of(column)
    calls = column.removesuffix("_us") + "_calls"
    covered_us = population.sums["step_us"] * digest.alone_share
    return Part(
        name=STEP_PARTS.get(column, column.removesuffix("_us")),
        column=column,
        calls_per_step=population.mean(calls) if calls in population.sums else None,
        mean_us=max(population.mean(column), 0.0),
        p50_us=digest.quantile(column, 0.5),
        p99_us=digest.quantile(column, 0.99),
        most_us=digest.most_us[column],
        share=share_of(max(population.sums.get(column, 0.0), 0.0), covered_us),
    )


@dataclass(frozen=True)
class Felt:
    """The connector's share of the time for which users waited.

    `share` is that of all their time; half of it was spent at a share below `p50`.
    """

    share: Estimate
    p50: float
    p99: float
    requests: int


def felt(requests: pl.DataFrame) -> dict[str, Felt]:
    """Compute the connector's share of TTFT and of the time per output token, TPOT.

    A request counts by the time that it waited: an answer of two tokens is hardly
    waited for. Those that were in a long step are left out.
    """
    if "e2e.connector_us" not in requests.columns:
        return {}
    known = requests.filter(~pl.col("is_long")).drop_nulls("e2e.connector_us")
    decode = known.drop_nulls("tpot_us").select(
        (pl.col("e2e.connector_us") - pl.col("ttft.connector_us")).alias("connector"),
        (pl.col("e2e_us") - pl.col("ttft_us")).alias("whole"),
    )
    first = known.select(
        pl.col("ttft.connector_us").alias("connector"), pl.col("ttft_us").alias("whole")
    )
    spans = {"ttft": first.drop_nulls(), "tpot": decode.drop_nulls()}
    return {
        name: _felt(span["connector"].to_numpy(), span["whole"].to_numpy())
        for name, span in spans.items()
        if span.height and span["whole"].to_numpy().sum() > 0
    }


def _felt(connector_us: Floats, whole_us: Floats) -> Felt:
    connector_us = np.maximum(connector_us, 0)
    shares = connector_us / np.maximum(whole_us, 1e-9)
    order = np.argsort(shares)
    below = np.cumsum(whole_us[order]) / whole_us.sum()
    p50, p99 = (float(shares[order][np.searchsorted(below, q)]) for q in (0.5, 0.99))
    return Felt(_ratio(connector_us, whole_us), p50, p99, len(whole_us))


def _ratio(parts: Floats, wholes: Floats) -> Estimate:
    """Divide two sums; the interval is of a jackknife over stretches of time."""
    value = float(parts.sum() / wholes.sum())
    count = min(STRETCHES, len(parts))
    if count < STRETCHES:
        return Estimate(value)
    without = [
        (parts.sum() - own.sum()) / (wholes.sum() - whole.sum())
        for own, whole in zip(
            np.array_split(parts, count), np.array_split(wholes, count), strict=True
        )
    ]
    spread = np.sqrt((count - 1) * np.var(without))
    reach = float(t_quantile(0.975, count - 1) * spread)
    return Estimate(value, (max(value - reach, 0.0), value + reach))


PARTS_OF_A_REQUEST = {
    "queued": "queued_us",
    "waiting for KV": "kv_wait_us",
    "model": "model_us",
    "scheduler": "scheduler_us",
    "connector": "connector_us",
    "other": "other_us",
}


def parts_of_requests(requests: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Compute each part's share of all requests' time to their first token and end.

    Each share is that of the sums, by part and span. Parts that were not recorded are
    left out.
    """
    shares: dict[str, dict[str, float]] = {}
    for span, whole in (("ttft", "ttft_us"), ("e2e", "e2e_us")):
        for name, part in PARTS_OF_A_REQUEST.items():
            if (column := f"{span}.{part}") not in requests.columns:
                continue
            known = requests.select(whole, column).drop_nulls()
            total_us, part_us = (float(us.to_numpy().sum()) for us in known)
            if total_us:
                shares.setdefault(name, {})[span] = part_us / total_us
    return shares


def waited_most(requests: pl.DataFrame, count: int) -> pl.DataFrame:
    """Select the requests that waited longest for the connector, if that is known."""
    known = "e2e.connector_us" in requests.columns
    by = "e2e.connector_us" if known else "e2e_us"
    return requests.sort(by, descending=True, nulls_last=True).head(count)


@dataclass(frozen=True)
class InstanceSummary:
    """An instance and what was computed of it; `cost` is None without steps.

    `slopes` are by time: `connector_us` and each of the connector's methods, if there
    are any. `felt` is the connector's share of what requests waited for, `outside` what
    their clients waited for.
    """

    instance: Instance
    cost: Cost | None
    slopes: dict[str, Slopes]
    felt: dict[str, Felt]
    outside: list[list[Cell]]

    @property
    def release(self) -> str:
        return f"vLLM {self.instance.vllm_version or 'of unknown release'}"

    @property
    def title(self) -> str:
        """Server and release, and how much of it was recorded."""
        instance = self.instance
        if self.cost is None:
            return f"{instance.name}: {self.release}, no steps"
        every = instance.header.every
        steps = f"{self.cost.steps:,} steps" + (
            f", one in {every}," if every > 1 else ""
        )
        return (
            f"{instance.name}: {self.release}, {steps} in {self.cost.seconds:,.0f} s, "
            f"{instance.all_requests:,} requests"
        )


def summarise(instance: Instance) -> InstanceSummary:
    """Compute everything that terminal and page show of the instance."""
    times = ("connector_us", *instance.methods) if instance.methods else ()
    return InstanceSummary(
        instance,
        cost(instance),
        moves(instance.digest, times),
        felt(instance.requests),
        outside(instance.requests),
    )
