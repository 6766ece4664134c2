# SPDX-License-Identifier: Apache-2.0
"""Summary of one instance, shared by terminal and page: costs, covariates, requests.

A server's own traffic is no experiment: |cache|, running requests and context rise and
fall together. So all covariates are fitted at once, on means over blocks of
neighbouring steps, time among them, and a covariate that hardly moved, went one way
only, or moved together with another, is reported as unknown. A slope shows that the
cost moved with it, not that it is the reason: `kvtax sweep` measures that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from kvtax.look.clients import outside
from kvtax.look.instances import Instance
from kvtax.report.document import Cell
from kvtax.stats import Estimate
from kvtax.stats.distribution import as_float, share_of
from kvtax.stats.least_squares import (
    STRETCHES,
    jackknifed_slopes,
    share_explained_by_others,
)
from kvtax.steps.parts import STEP_PARTS

BLOCK_STEPS = 50
# Columns of what the engine's process does, which is known of each step.
OF_THE_ENGINE = ("step_us", "scheduler")
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


def used_blocks(steps: pl.DataFrame) -> pl.DataFrame:
    """Add `used_blocks`: what running requests hold, up to a constant."""
    most = steps["free_blocks"].max()
    return steps.with_columns(
        (pl.lit(most) - pl.col("free_blocks")).alias("used_blocks")
    )


# Slope in us per step by axis, or why it is not known.
Slopes = dict[str, Estimate | str]


def moves(steps: pl.DataFrame, times: Sequence[str]) -> dict[str, Slopes]:
    """For each of the columns `times`: the slope of its mean along each axis."""
    blocks = _blocks(used_blocks(steps), times)
    unknown = _unmoved(blocks)
    axes = {name: axis for name, axis in COVARIATES.items() if name not in unknown}
    if not axes or not times:
        return {time: {**unknown} for time in times}
    columns = [blocks[axis.column].to_numpy() / axis.per for axis in axes.values()]
    matrix = np.stack([*columns, np.linspace(0, 1, blocks.height)], axis=1)
    together = share_explained_by_others(matrix) > MOST_EXPLAINED
    for name in np.array([*axes])[together[:-1]]:
        unknown[name] = "it moved together with the others"
    told = {}
    for time, slopes in zip(
        times, jackknifed_slopes(matrix, blocks.select(times).to_numpy()), strict=True
    ):
        known = dict(zip(axes, slopes[:-1], strict=True)) | unknown
        told[time] = {name: known[name] for name in COVARIATES}
    return told


def _blocks(steps: pl.DataFrame, times: Sequence[str]) -> pl.DataFrame:
    """Means over blocks of neighbouring steps."""
    columns = [*times, *(axis.column for axis in COVARIATES.values())]
    number = (pl.int_range(pl.len()) // BLOCK_STEPS).set_sorted()
    return (
        steps.select(*columns, number.alias("block"))
        .group_by("block", maintain_order=True)
        .agg(pl.col(columns).mean())
    )


def _swings(column: pl.Series, least_range: float) -> int | None:
    """Count the ways from low to high and back; None if the range is too small."""
    low, high = (as_float(column.quantile(share)) for share in (0.05, 0.95))
    if high - low < least_range:
        return None
    quarter = (high - low) / 4
    values = column.to_numpy()
    side = np.where(values < low + quarter, -1, np.where(values > high - quarter, 1, 0))
    return int(np.count_nonzero(np.diff(side[side != 0])))


def _unmoved(blocks: pl.DataFrame) -> dict[str, str]:
    """Name the axes that say nothing about these blocks, and why."""
    if blocks.height < 2 * STRETCHES:
        return dict.fromkeys(
            COVARIATES, f"fewer than {2 * STRETCHES * BLOCK_STEPS:,} steps"
        )
    told = {}
    for name, axis in COVARIATES.items():
        column = blocks[axis.column]
        if column.null_count():
            told[name] = "not recorded"
        elif (swings := _swings(column, axis.least_range)) is None:
            told[name] = "it hardly changed"
        elif swings < FEWEST_SWINGS:
            told[name] = "it hardly went up and down, so time may be the reason"
    return told


@dataclass(frozen=True)
class Part:
    """Times in us per step, over all steps; `share` of the time in which steps ran."""

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
    overlap. `connector_ms_per_s` is per second in which steps ran. Model, connector,
    its methods in the worker and other are of the `worker_steps` that have a worker's
    record. `at_start_us` and `between_us` are in no part (Instance).
    """

    steps: int
    worker_steps: int
    seconds: float
    period_us: float
    step: Part
    parts: list[Part]
    methods: list[Part]
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
    def overlap(self) -> str:
        """Say in words how often steps ended; empty where they do not overlap."""
        if self.step.mean_us < MOST_ALONE * self.period_us:
            return ""
        return f"steps overlap, one ended every {self.period_us:,.0f} µs"


def cost(instance: Instance) -> Cost | None:
    """Compute the cost, None without steps; the method that takes most comes first."""
    steps, with_worker = instance.steps, instance.with_worker
    if not steps.height:
        return None
    known = [name for name in STEP_PARTS if steps[name].count()]

    def part(name: str) -> Part:
        # What the worker does is a share of the steps in which it is recorded.
        in_all = name.startswith(OF_THE_ENGINE)
        return _part(steps if in_all else with_worker, name, instance.alone_share)

    parts, methods = map(part, known), [part(name) for name in instance.methods]
    # All time that is in no other part, as that of overlapping steps is in several.
    *others, rest = parts
    left = max(0.0, 1.0 - sum(part.share for part in others))
    return Cost(
        steps=steps.height,
        worker_steps=with_worker.height,
        seconds=(steps["end_ns"].max() - steps["t_ns"][0]) / 1e9,
        period_us=(instance.covered_us or 1.0) / steps.height,
        step=replace(part("step_us"), share=1.0),
        parts=[*others, replace(rest, share=left, mean_us=max(rest.mean_us, 0.0))],
        methods=sorted(methods, key=lambda part: -part.mean_us),
        at_start_us=instance.at_start_us,
        between_us=instance.between_us,
    )


def _part(steps: pl.DataFrame, column: str, alone_share: float) -> Part:
    us = steps[column]
    p50_us, p99_us = quantiles(us, (0.5, 0.99))
    calls = column.removesuffix("_us") + "_calls"
    covered_us = as_float(steps["step_us"].cast(pl.Float64).sum()) * alone_share
    return Part(
        name=STEP_PARTS.get(column, column.removesuffix("_us")),
        column=column,
        calls_per_step=(
            as_float(steps[calls].mean()) if calls in steps.columns else None
        ),
        mean_us=as_float(us.mean()),
        p50_us=p50_us,
        p99_us=p99_us,
        most_us=as_float(us.max()),
        share=share_of(float(us.sum()), covered_us),
    )


def quantiles(us: pl.Series, shares: Sequence[float]) -> list[float]:
    """Find the values nearest to these quantiles, as Series.quantile does, of a column
    without nulls. All at once takes half the time."""
    at = [math.floor((len(us) - 1) * share + 0.5) for share in shares]
    return [float(one) for one in np.partition(us.to_numpy(), at)[at]]


def felt(requests: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Compute p50 and p99 of the connector's share of TTFT and of a request's time.

    A request that waited 3 ms for the connector's calls, of 100 ms, felt 0.03.
    """
    told = {}
    for span, whole in (("ttft", "ttft_us"), ("e2e", "e2e_us")):
        column = f"{span}.connector_us"
        if column not in requests.columns:
            continue
        share = (requests[column] / requests[whole]).drop_nulls()
        if len(share):
            told[span] = {
                "p50": as_float(share.quantile(0.5)),
                "p99": as_float(share.quantile(0.99)),
            }
    return told


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
            if total_us := as_float(known[whole].sum()):
                part_us = as_float(known[column].sum())
                shares.setdefault(name, {})[span] = part_us / total_us
    return shares


def waited_most(requests: pl.DataFrame, count: int) -> pl.DataFrame:
    """Select the requests that waited longest for the connector, if that is known."""
    known = "e2e.connector_us" in requests.columns
    by = "e2e.connector_us" if known else "e2e_us"
    return requests.sort(by, descending=True, nulls_last=True).head(count)


@dataclass(frozen=True)
class InstanceSummary:
    """An instance and what was found of it; `cost` is None without steps.

    `slopes` are by time: `connector_us` and each of the connector's methods, if there
    are any. `felt` is
    the connector's share of what requests waited for, `outside` what their clients did.
    """

    instance: Instance
    cost: Cost | None
    slopes: dict[str, Slopes]
    felt: dict[str, dict[str, float]]
    outside: list[list[Cell]]

    @property
    def title(self) -> str:
        """Server and release, and how much of it was recorded."""
        instance = self.instance
        release = f"vLLM {instance.vllm_version or 'of unknown release'}"
        if self.cost is None:
            return f"{instance.name}: {release}, no steps"
        every = instance.header.every
        steps = f"{self.cost.steps:,} steps" + (
            f", one in {every}," if every > 1 else ""
        )
        return (
            f"{instance.name}: {release}, {steps} in {self.cost.seconds:,.0f} s, "
            f"{instance.requests.height:,} requests"
        )


def summarise(instance: Instance) -> InstanceSummary:
    """Compute everything that terminal and page show of the instance."""
    times = ("connector_us", *instance.methods) if instance.methods else ()
    return InstanceSummary(
        instance,
        cost(instance),
        moves(instance.with_worker, times),
        felt(instance.requests),
        outside(instance.requests),
    )
