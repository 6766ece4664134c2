# SPDX-License-Identifier: Apache-2.0
"""TTFT, TPOT and E2E of each arm, by class, in the steady window and over all."""

from __future__ import annotations

from typing import Any

import polars as pl

from fleet.analyze.frames import LATENCIES
from fleet.analyze.sessions import SessionDraws
from fleet.policies.size_class import CLASSES
from lab.stats.interval import stated

WINDOWS = ("steady", "all")


def latency_table(requests: pl.DataFrame, draws: SessionDraws) -> dict[str, Any]:
    """{arm: {window: {class or "all": {n, sessions, <latency>: quantiles}}}}.

    `requests` is a requests_frame; n and sessions count requests that ended ok. A
    class or window without any is left out.
    """
    table: dict[str, Any] = {}
    ok = requests.filter(pl.col("status") == "ok")
    for arm in requests["arm"].unique(maintain_order=True):
        own = ok.filter(pl.col("arm") == arm)
        table[arm] = {
            window: _classes(_in(own, window), draws)
            for window in WINDOWS
            if _in(own, window).height
        }
    return table


def best_window(latency: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The steady window of one arm where it has one, else all of it; {} without any."""
    for window in WINDOWS:
        if window in latency:
            return window, latency[window]
    return "all", {}


def _in(requests: pl.DataFrame, window: str) -> pl.DataFrame:
    return requests if window == "all" else requests.filter(pl.col("window") == window)


def _classes(requests: pl.DataFrame, draws: SessionDraws) -> dict[str, Any]:
    entries = {}
    for kind in ("all", *CLASSES):
        own = requests if kind == "all" else requests.filter(pl.col("class") == kind)
        if own.height:
            entries[kind] = _entry(own, draws)
    return entries


def _entry(requests: pl.DataFrame, draws: SessionDraws) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "n": requests.height,
        "sessions": requests["session"].n_unique(),
    }
    for name in LATENCIES:
        levels = draws.quantiles(requests[name], requests["session"])
        entry[name] = {quantile: stated(level, 4) for quantile, level in levels.items()}
    return entry
