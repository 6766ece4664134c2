# SPDX-License-Identifier: Apache-2.0
"""gpu.csv of an arm: how busy each GPU was while requests were under way."""

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
    without a sample then. Raises RecordsError.
    """
    path = folder / "gpu.csv"
    if not path.exists():
        return None
    try:
        samples = pl.read_csv(path, schema=COLUMNS)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RecordsError(f"{path}: {error}") from None
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
