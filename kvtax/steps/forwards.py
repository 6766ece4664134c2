# SPDX-License-Identifier: Apache-2.0
"""Sleep of the null model in each step, as it measured it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

# Rows of two int64: when a forward ended and for how long it slept, in ns; zeros behind
# them. The null model writes it.
FORWARDS = "forward_times.int64"


def with_forwards(
    steps: pl.DataFrame, file: Path, nominal_us: float | None
) -> pl.DataFrame:
    """Add `forward_us` to steps in order: the sleep of the forward in each.

    Where `file` is missing it is `nominal_us`; where no forward ended in a step, null.
    """
    if not file.is_file():
        return steps.with_columns(forward_us=pl.lit(nominal_us, pl.Float64))
    ended_ns, slept_ns = np.fromfile(file, np.int64).reshape(-1, 2).T
    ended_ns, slept_ns = ended_ns[ended_ns > 0], slept_ns[ended_ns > 0]
    began_ns = steps["t_ns"].to_numpy()
    until_ns = began_ns + 1e3 * steps["step_us"].cast(pl.Float64).to_numpy()
    first = np.searchsorted(ended_ns, began_ns)
    has_one = np.zeros(steps.height, bool)
    inside = first < len(ended_ns)
    has_one[inside] = ended_ns[first[inside]] <= until_ns[inside]
    us = np.full(steps.height, np.nan)
    us[has_one] = slept_ns[first[has_one]] / 1e3
    return steps.with_columns(forward_us=pl.Series(us).fill_nan(None))
