# SPDX-License-Identifier: Apache-2.0
"""gpu.csv of an arm, or of each of its hosts: how busy each GPU was under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from lab.records import RecordsError

COLUMNS = {
    "monotonic_ns": pl.Int64,
    "gpu": pl.String,
    "utilization_percent": pl.Float64,
    "memory_used_mib": pl.Float64,
    "power_w": pl.Float64,
    "sm_clock_mhz": pl.Float64,
}


def gpu_use(folder: Path, requests: pl.DataFrame) -> dict[str, Any] | None:
    """{gpu: {samples, utilization_percent, memory_used_mib_max, power_w}}, means.

    Between the first send and the last end of `requests`; None without gpu.csv or
    without a sample then. GPUs of a fleet over hosts are named `<host> <gpu>`.
    Raises RecordsError.
    """
    paths = {path: "" for path in folder.glob("gpu.csv")}
    paths |= {path: f"{path.parent.name} " for path in folder.glob("hosts/*/gpu.csv")}
    if not paths:
        return None
    samples = pl.concat([_samples(path, host) for path, host in paths.items()])
    first, last = requests["sent_ns"].min(), requests["end_ns"].max()
    during = samples.filter(pl.col("monotonic_ns").is_between(first, last))
    table = (
        during.group_by("gpu")
        .agg(
            pl.len().alias("samples"),
            pl.col("utilization_percent").mean().round(2),
            pl.col("memory_used_mib").max().alias("memory_used_mib_max"),
            pl.col("power_w").mean().round(1),
        )
        .sort("gpu")
    )
    return {entry.pop("gpu"): entry for entry in table.to_dicts()} or None


def _samples(path: Path, host: str) -> pl.DataFrame:
    """Raises RecordsError."""
    try:
        samples = pl.read_csv(path, schema=COLUMNS)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RecordsError(f"{path}: {error}") from None
    return samples.with_columns(gpu=pl.lit(host) + pl.col("gpu"))
