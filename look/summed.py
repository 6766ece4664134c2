# SPDX-License-Identifier: Apache-2.0
"""What is told of many servers together: their counts, and what each was by itself.

It is a Parquet file of a few MB however many steps there were, to be read anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import polars as pl

from lab.records import RecordsError
from lab.records.warning import RunWarning
from look.counts import counts_of, merged, slope
from look.found import find
from look.instances import Instance, one_by_one

# What the file is; counted up when it changes.
SCHEMA = "kvtax.summed/1"
TOLD = "kvtax_summed"


class Server(msgspec.Struct, frozen=True):
    """One engine lifetime. By time: `us` per step, and per 1,000 cached blocks."""

    name: str
    vllm_version: str | None
    steps: int
    us: dict[str, float]
    slopes: dict[str, float | None]


class Beside(msgspec.Struct, frozen=True):
    """What stands in the file beside the counts."""

    schema: str
    servers: list[Server]
    warnings: list[RunWarning]


class Summed(msgspec.Struct, frozen=True):
    """Servers in order of their names, and look.counts of their steps."""

    counts: pl.DataFrame
    servers: list[Server]
    warnings: list[RunWarning]

    @property
    def steps(self) -> int:
        return sum(server.steps for server in self.servers)


def summed(folder: Path, host: str) -> Summed:
    """Of all servers below `folder`, whose names get `host` before them.

    Raises RecordsError if there are no step records at all.
    """
    found, warnings = find(folder)
    several = [Summed(merged([]), [], warnings)]
    for read in one_by_one(found):
        if isinstance(read, RunWarning):
            several.append(Summed(merged([]), [], [read]))
        else:
            # To keep the sum alone keeps the memory small.
            several = [together([*several, _of(read, host)])]
    return together(several)


def together(several: Iterable[Summed]) -> Summed:
    """Raises RecordsError if a server is in two of them."""
    several = list(several)
    servers = [server for one in several for server in one.servers]
    names = [server.name for server in servers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecordsError(f"{', '.join(sorted(twice))} would be counted twice")
    return Summed(
        merged(one.counts for one in several),
        sorted(servers, key=lambda server: server.name),
        [warning for one in several for warning in one.warnings],
    )


def write_summed(path: Path, one: Summed) -> None:
    """Whole or not at all."""
    told = Beside(SCHEMA, one.servers, one.warnings)
    partial = path.with_name(f"{path.name}.partial")
    one.counts.write_parquet(
        partial, metadata={TOLD: msgspec.json.encode(told).decode()}
    )
    os.replace(partial, path)


def read_summed(path: Path) -> Summed:
    """Raises RecordsError."""
    try:
        metadata = pl.read_parquet_metadata(path)
        told = msgspec.json.decode(metadata[TOLD], type=Beside)
        counts = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError, KeyError, msgspec.DecodeError):
        raise RecordsError(
            f"{path}: not a file that python -m look.reduce wrote"
        ) from None
    if told.schema != SCHEMA:
        raise RecordsError(f"{path}: schema {told.schema}, not {SCHEMA}")
    return Summed(counts, told.servers, told.warnings)


def _of(instance: Instance, host: str) -> Summed:
    counts = counts_of(instance)
    by_time = counts.partition_by("time", as_dict=True)
    server = Server(
        name=f"{host}/{instance.name}",
        vllm_version=instance.vllm_version,
        steps=instance.steps.height,
        us={
            time: one["sum_ns"].sum() / one["steps"].sum() / 1e3
            for (time,), one in by_time.items()
        },
        slopes={time: slope(one) for (time,), one in by_time.items()},
    )
    return Summed(counts, [server], instance.warnings)
