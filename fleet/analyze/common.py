# SPDX-License-Identifier: Apache-2.0
"""The requests that several runs have in common: only these can be compared."""

from __future__ import annotations

import polars as pl

# Fewer steady requests in common than this are too few to leave the others out.
MIN_COMMON = 50


def same_requests(arms: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """("steady" or "all", the requests to compare out of those of all `arms`).

    Those that ended ok in every repeat of every arm, and were in the steady window
    there: each arm has a window of its own, and a slow arm's holds other turns. Where
    these are fewer than MIN_COMMON, those of any window.
    """
    runs = arms.select("arm", "repeat").n_unique()
    ok = arms.filter(pl.col("status") == "ok")
    steady = _in_all(ok.filter(pl.col("window") == "steady"), runs)
    if steady["id"].n_unique() >= MIN_COMMON:
        return "steady", steady
    return "all", _in_all(ok, runs)


def _in_all(requests: pl.DataFrame, runs: int) -> pl.DataFrame:
    """The requests whose id is there in all of the `runs`."""
    seen = pl.struct("arm", "repeat").n_unique().over("id")
    return requests.filter(seen == runs)
