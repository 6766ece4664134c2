# SPDX-License-Identifier: Apache-2.0
"""The CPU time of each thread of the engine's process, sample by sample."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import polars as pl

from lab.records.lines import read_lines
from lab.records.threads import ThreadsHeader, ThreadTimes

SCHEMA = {
    "repeat": pl.Int16,
    "step_id": pl.Int64,
    "phase": pl.UInt8,
    "batch": pl.Int16,
    "cache_blocks": pl.Int32,
    "steps": pl.Int64,
    "thread": pl.String,
    "us": pl.Float64,
    "us_per_step": pl.Float64,
}


# vLLM's own: those that were there before the connector, and those that serve requests
# and are as busy as these. And our recorder's.
OWN = r"^MainThread$|^model executor$|\(process_(in|out)put_sockets\)$|^records-"
NO_THREADS = pl.DataFrame(schema=SCHEMA)


def read_threads(path: Path, steps: pl.DataFrame) -> pl.DataFrame:
    """A row for each sample and thread; empty if there is no such file.

    Threads of equal names count as one: their numbers differ from server to server.
    `steps` is the trial's table of steps: a sample has the |cache| and the phase of its
    last step. Samples without a step are left out. `batch` is 0.
    """
    if not path.is_file() or not steps.height:
        return NO_THREADS
    records = read_lines(path, ThreadsHeader, ThreadTimes).records
    names = sorted({_kind(name) for record in records for name in record.threads})
    at = dict(
        zip(
            steps["step_id"].to_list(),
            steps.select("repeat", "phase", "cache_blocks").iter_rows(),
            strict=True,
        )
    )
    rows = []
    for before, record in pairwise(records):
        made = record.step_id - before.step_id
        if made <= 0 or record.step_id not in at:
            continue
        repeat, phase, blocks = at[record.step_id]
        spent = dict.fromkeys(names, 0.0)
        for name, us in record.threads.items():
            spent[_kind(name)] += us
        for name, us in spent.items():
            at_step = (repeat, record.step_id, phase, 0, blocks, made)
            rows.append((*at_step, name, us, us / made))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def with_threads(steps: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """`steps` with threads_us, at the last step of each sample and else null.

    CPU time per step since the sample before, of all threads but vLLM's own.
    """
    others = threads.filter(~pl.col("thread").str.contains(OWN))
    spent = others.group_by("step_id").agg(
        pl.col("us_per_step").sum().alias("threads_us")
    )
    return steps.join(spent, on="step_id", how="left", maintain_order="left")


def _kind(name: str) -> str:
    return name.partition("#")[0]
