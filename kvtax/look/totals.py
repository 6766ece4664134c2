# SPDX-License-Identifier: Apache-2.0
"""Steps as counts that can be added: of many servers, on many hosts, and still small.

A step is counted in the cell of its |cache|, to 1,000 blocks, and its running requests,
to a quarter, and exactly up to 7. In a cell each time has a histogram whose buckets are
2 % wide, as in DDSketch (Masson, Rim and Lee 2019), and each bucket knows how many
steps it has and their whole time. To merge is to add: in any order, with the same
result, to the last bit.

A quantile is that of all steps within 1 %, or 1 ns where that is more. Counts, means,
the most and what is computed from means are exact to the 0.5 ns that times are rounded
to.

Slopes cannot be added: each is fitted to a server's own steps, in order of time, and
the interval is over servers. Totals of many servers, with a summary of each, are a
Parquet file of a few MB however many steps there were, to be read anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from kvtax.look.discover import discover
from kvtax.look.instance_summary import OF_THE_ENGINE, moves
from kvtax.look.instances import Instance, one_by_one
from kvtax.records import RecordsError
from kvtax.records.files import replacing
from kvtax.records.warning import RunWarning
from kvtax.stats.distribution import Floats, Ints, as_float
from kvtax.steps.parts import STEP_PARTS

ALPHA = 0.01
GAMMA = (1 + ALPHA) / (1 - ALPHA)
CACHE_BLOCKS = 1_000
CELL = ("cache_from", "running_from")
KEYS = ("time", *CELL, "bucket")
# As polars adds them: `steps`, `calls` of the method, their ns, and their |cache|.
SUMS = ("steps", "calls", "sum_ns", "sum_blocks")
SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "time": pl.String,
    "cache_from": pl.Int32,
    "running_from": pl.Int32,
    "bucket": pl.Int32,
    "steps": pl.Int64,
    "calls": pl.Int64,
    "sum_ns": pl.Int64,
    "sum_blocks": pl.Int64,
    "most_ns": pl.Int64,
}
NOTHING = pl.DataFrame(schema=SCHEMA)
TIMES = ("step_us", *STEP_PARTS)


def counts_of(instance: Instance) -> pl.DataFrame:
    """Count an instance's steps: a row per time, cell and bucket (SCHEMA).

    Times are a step, its parts, and the connector's methods, as far as they are known.
    Cells are null where the records do not tell them.
    """
    of_engine = instance.steps.with_columns(_cells())
    of_worker = instance.with_worker.with_columns(_cells())
    return merged(
        _counted(of_engine if time.startswith(OF_THE_ENGINE) else of_worker, time)
        for time in _times(instance)
    )


def _times(instance: Instance) -> list[str]:
    known = [name for name in TIMES if instance.steps[name].count()]
    return [*known, *instance.methods]


def merged(several: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Add counts up, in order of KEYS."""
    return (
        pl.concat([NOTHING, *several])
        .group_by(KEYS)
        .agg(pl.col(SUMS).sum(), pl.col("most_ns").max())
        .sort(KEYS)
    )


def quantiles(counts: pl.DataFrame, shares: Sequence[float]) -> list[float]:
    """Compute quantiles in us of one time; instance_summary.quantiles is exact."""
    buckets = counts.group_by("bucket").agg(pl.col("steps").sum()).sort("bucket")
    below = buckets["steps"].cum_sum().to_numpy()
    ranks = [math.floor((below[-1] - 1) * share + 0.5) for share in shares]
    at = np.searchsorted(below, ranks, side="right")
    return [float(ns) / 1e3 for ns in _middle_ns(buckets["bucket"].to_numpy()[at])]


def mean_us(counts: pl.DataFrame) -> float:
    """Average the steps of one time, in us."""
    return as_float(counts["sum_ns"].sum()) / as_float(counts["steps"].sum()) / 1e3


def _cells() -> list[pl.Expr]:
    running = pl.col("running").clip(lower_bound=1)
    quarter = 2 ** (running.log(2).floor() - 2).clip(lower_bound=0)
    return [
        (pl.col("cache_size") // CACHE_BLOCKS * CACHE_BLOCKS).alias("cache_from"),
        ((running / quarter).floor() * quarter).cast(pl.Int32).alias("running_from"),
    ]


def _counted(steps: pl.DataFrame, time: str) -> pl.DataFrame:
    calls = time.removesuffix("_us") + "_calls"
    ns = (pl.col(time).cast(pl.Float64) * 1e3).round().cast(pl.Int64)
    return (
        steps.lazy()
        .select(
            *CELL,
            ns.alias("ns"),
            pl.col("cache_size").fill_null(0).cast(pl.Int64).alias("blocks"),
            (pl.col(calls) if calls in steps.columns else pl.lit(0)).alias("calls"),
        )
        .with_columns(_bucket().alias("bucket"))
        .group_by(*CELL, "bucket")
        .agg(
            pl.len().cast(pl.Int64).alias("steps"),
            pl.col("calls").cast(pl.Int64).sum(),
            pl.col("ns").sum().alias("sum_ns"),
            pl.col("blocks").sum().alias("sum_blocks"),
            pl.col("ns").max().alias("most_ns"),
        )
        .select(pl.lit(time).alias("time"), pl.all())
        .collect()
        .cast(pl.Schema(SCHEMA))
    )


def _bucket() -> pl.Expr:
    """In order of their values: 0 for 0, below it those of times below zero."""
    ns = pl.col("ns")
    number = (ns.abs().clip(lower_bound=1).log() / math.log(GAMMA)).ceil() + 1
    return (ns.sign() * number).cast(pl.Int32)


def _middle_ns(bucket: Ints) -> Floats:
    """Compute the value within ALPHA of all in the bucket."""
    above = 2 * GAMMA ** (np.abs(bucket) - 1.0) / (GAMMA + 1)
    size = np.where(np.abs(bucket) == 1, 1.0, above)
    return np.asarray(np.sign(bucket) * size)


# What the file is; counted up when it changes.
FILE_SCHEMA = "kvtax.summed/3"
METADATA = "kvtax_summed"


class ServerTotals(msgspec.Struct, frozen=True):
    """One engine lifetime. By time: `us` per step, and per 1,000 cached blocks.

    `covered_us` is the time in which steps ran, that of overlapping ones once.
    """

    name: str
    vllm_version: str | None
    steps: int
    covered_us: float
    us: dict[str, float]
    slopes: dict[str, float | None]


class Beside(msgspec.Struct, frozen=True):
    """Metadata of the file: everything beside the counts."""

    schema: str
    servers: list[ServerTotals]
    warnings: list[RunWarning]


class StepTotals(msgspec.Struct, frozen=True):
    """Servers in order of their names, and kvtax.look.totals of their steps."""

    counts: pl.DataFrame
    servers: list[ServerTotals]
    warnings: list[RunWarning]

    @property
    def steps(self) -> int:
        return sum(server.steps for server in self.servers)


def totals_of(folder: Path, host: str) -> StepTotals:
    """Count the steps of all servers below `folder`; `host` prefixes their names.

    Raises RecordsError if there are no step records at all.
    """
    found, warnings = discover(folder)
    several = [StepTotals(merged([]), [], warnings)]
    for read in one_by_one(found):
        if isinstance(read, RunWarning):
            several.append(StepTotals(merged([]), [], [read]))
        else:
            # To keep the sum alone keeps the memory small.
            several = [merge_totals([*several, _of(read, host)])]
    return merge_totals(several)


def merge_totals(several: Iterable[StepTotals]) -> StepTotals:
    """Add totals up. Raises RecordsError if a server is in two of them."""
    several = list(several)
    servers = [server for one in several for server in one.servers]
    names = [server.name for server in servers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecordsError(f"{', '.join(sorted(twice))} would be counted twice")
    return StepTotals(
        merged(one.counts for one in several),
        sorted(servers, key=lambda server: server.name),
        [warning for one in several for warning in one.warnings],
    )


def write_totals(path: Path, one: StepTotals) -> None:
    """Write the file, whole or not at all."""
    beside = Beside(FILE_SCHEMA, one.servers, one.warnings)
    metadata = {METADATA: msgspec.json.encode(beside).decode()}
    with replacing(path) as file:
        one.counts.write_parquet(file, metadata=metadata)


def read_totals(path: Path) -> StepTotals:
    """Read a file that `write_totals` wrote. Raises RecordsError."""
    try:
        metadata = pl.read_parquet_metadata(path)
        beside = msgspec.json.decode(metadata[METADATA], type=Beside)
        counts = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError, KeyError, msgspec.DecodeError):
        raise RecordsError(
            f"{path}: not a file that kvtax look --summary wrote; of "
            "records, name their folder"
        ) from None
    if beside.schema != FILE_SCHEMA:
        raise RecordsError(f"{path}: schema {beside.schema}, not {FILE_SCHEMA}")
    return StepTotals(counts, beside.servers, beside.warnings)


def _of(instance: Instance, host: str) -> StepTotals:
    counts = counts_of(instance)
    by_time = counts.partition_by("time", as_dict=True)
    slopes = moves(instance.with_worker, _times(instance))
    server = ServerTotals(
        name=f"{host}/{instance.name}",
        vllm_version=instance.vllm_version,
        steps=instance.steps.height,
        covered_us=instance.covered_us,
        us={time: mean_us(one) for (time,), one in by_time.items()},
        slopes={
            time: None if isinstance(cache := by_axis["cache"], str) else cache.value
            for time, by_axis in slopes.items()
        },
    )
    return StepTotals(counts, [server], instance.warnings)
