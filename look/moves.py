# SPDX-License-Identifier: Apache-2.0
"""What a connector's cost moves with in recorded traffic: |cache|, requests, context.

A server's own traffic is no experiment: |cache|, running requests and context rise and
fall together. So all are fitted at once, on means over blocks of neighbouring steps,
and one that hardly moved, or only moved together with another, is said to be unknown.
What is found is that the cost moved with it, not that it is the reason: `run_all.sh`
tells that.

The interval is a jackknife that leaves out a twentieth of the time at once (Kunsch
1989), so it holds for noise that is forgotten within that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from lab.stats.estimate import Floats
from lab.stats.t_and_f import t_quantile

BLOCK_STEPS = 50
RUNS = 20
# Correlation with the other axes above which two cannot be told apart: a variance
# inflation of 10 (Marquardt 1970).
MOST_EXPLAINED = 0.9


@dataclass(frozen=True)
class Axis:
    """Something that a cost may move with, and in which units a slope is told."""

    column: str
    per: float
    unit: str
    least_range: float


AXES = {
    "cache": Axis("cache_size", 1_000, "1,000 cached blocks", 500),
    "running": Axis("running", 1, "running request", 3),
    "context": Axis("used_blocks", 1_000, "1,000 blocks in use", 500),
    "prefill": Axis("prefill_tokens", 1_000, "1,000 prompt tokens", 100),
}


@dataclass(frozen=True)
class Slope:
    """us per step and unit of the axis; `low` and `high` are a 95 % interval."""

    value: float
    low: float
    high: float


def used_blocks(steps: pl.DataFrame) -> pl.DataFrame:
    """`steps` with `used_blocks`: what running requests hold, up to a constant."""
    most = steps["free_blocks"].max()
    return steps.with_columns(
        (pl.lit(most) - pl.col("free_blocks")).alias("used_blocks")
    )


# By axis, or why it is not known.
Moves = dict[str, Slope | str]


def moves(steps: pl.DataFrame, times: Sequence[str]) -> dict[str, Moves]:
    """For each of the columns `times`: the slope of its mean along each axis."""
    blocks = _blocks(used_blocks(steps), times)
    unknown = _unmoved(blocks)
    axes = {name: axis for name, axis in AXES.items() if name not in unknown}
    if not axes:
        return dict.fromkeys(times, unknown)
    matrix = np.stack(
        [blocks[axis.column].to_numpy() / axis.per for axis in axes.values()], axis=1
    )
    together = _explained_by_others(matrix) > MOST_EXPLAINED
    for name in np.array([*axes])[together]:
        unknown[name] = "it moved together with the others"
    told = {}
    for time, slopes in zip(
        times, _slopes(matrix, blocks.select(times).to_numpy()), strict=True
    ):
        known = dict(zip(axes, slopes, strict=True)) | unknown
        told[time] = {name: known[name] for name in AXES}
    return told


def _blocks(steps: pl.DataFrame, times: Sequence[str]) -> pl.DataFrame:
    """Means over blocks of neighbouring steps."""
    columns = [*times, *(axis.column for axis in AXES.values())]
    number = (pl.int_range(pl.len()) // BLOCK_STEPS).set_sorted()
    return (
        steps.select(*columns, number.alias("block"))
        .group_by("block", maintain_order=True)
        .agg(pl.col(columns).mean())
    )


def _unmoved(blocks: pl.DataFrame) -> dict[str, str]:
    """The axes that say nothing about these blocks, and why."""
    if blocks.height < 2 * RUNS:
        return dict.fromkeys(AXES, f"fewer than {2 * RUNS * BLOCK_STEPS:,} steps")
    told = {}
    for name, axis in AXES.items():
        column = blocks[axis.column]
        if column.null_count():
            told[name] = "not recorded"
        elif column.quantile(0.95) - column.quantile(0.05) < axis.least_range:
            told[name] = "it hardly changed"
    return told


def _explained_by_others(matrix: Floats) -> Floats:
    """Of each column, the share of its variance that the others explain, (axes,)."""
    shares = np.zeros(matrix.shape[1])
    for index in range(matrix.shape[1]):
        others = np.delete(matrix, index, axis=1)
        own = matrix[:, index] - matrix[:, index].mean()
        design = np.column_stack([np.ones(len(own)), others])
        left = own - design @ np.linalg.lstsq(design, own, rcond=None)[0]
        shares[index] = 1 - float((left**2).sum()) / max(float((own**2).sum()), 1e-12)
    return shares


def _slopes(matrix: Floats, us: Floats) -> list[list[Slope]]:
    """Least squares with an offset, and a jackknife over runs of blocks.

    Of `matrix` (blocks, axes) and `us` (blocks, times); for each time, a slope by axis.
    """
    design = np.column_stack([np.ones(len(us)), matrix])
    ends = -(-np.arange(1, RUNS) * len(us) // RUNS)
    # What a run says of its slopes, in as many rows as there are columns.
    runs = []
    for rows, told in zip(np.split(design, ends), np.split(us, ends), strict=True):
        q, r = np.linalg.qr(rows)
        runs.append((r, q.T @ told))

    def fit(left_out: int | None) -> Floats:
        rows, told = zip(
            *(run for i, run in enumerate(runs) if i != left_out), strict=True
        )
        return np.linalg.lstsq(np.vstack(rows), np.vstack(told), rcond=None)[0][1:].T

    whole = fit(None)
    without = np.stack([fit(run) for run in range(RUNS)])
    spread = np.sqrt((RUNS - 1) * without.var(axis=0))
    reach = float(t_quantile(0.975, RUNS - 1)) * spread
    edges = np.stack([whole, whole - reach, whole + reach], axis=2).tolist()
    return [[Slope(*edge) for edge in of_time] for of_time in edges]
