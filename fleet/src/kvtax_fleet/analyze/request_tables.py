# SPDX-License-Identifier: Apache-2.0
"""Describe the requests of each arm: workload, outcomes, latencies."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze.frames import LATENCIES, Levels, estimates
from kvtax_fleet.policies.decision import CLASSES


class WorkloadSpread(msgspec.Struct):
    """Distribution of lengths."""

    mean: float
    """Mean."""
    p50: float
    """Median."""
    p90: float
    """90th percentile."""
    max: float
    """Greatest."""


class Workload(msgspec.Struct):
    """Lengths as requested.

    Growth is from a session's first prompt to its last, of sessions with several turns.
    """

    requests: int
    """Number of requests."""
    sessions: int
    """Number of sessions."""
    prefill_share: float
    """Input tokens of all tokens."""
    spreads: dict[str, WorkloadSpread | None]
    """By quantity; null where no session has it."""


class Outcomes(msgspec.Struct):
    """Requests of an arm by outcome."""

    n: int
    """Requests."""
    ok: int
    """Those with a whole answer."""
    failed: int
    """Those that failed."""
    cancelled: int
    """Those that were cancelled."""
    repeats: int
    """Repeats they come from."""
    modes: dict[str, int]
    """Requests by `status: error`."""
    fallbacks: dict[str, int]
    """Planned prefills elsewhere that were done here, by reason."""


class LatencyEntry(msgspec.Struct):
    """Quantiles of the requests that ended ok, in ms."""

    n: int
    """Requests."""
    sessions: int
    """Sessions they come from."""
    ttft_ms: Levels
    """From the intended time of sending to the first token."""
    tpot_ms: Levels
    """Per token after the first."""
    e2e_ms: Levels
    """From the intended time of sending to the last token."""
    ttft_sent_ms: Levels
    """TTFT from the time of sending."""
    e2e_sent_ms: Levels
    """E2E from the time of sending."""


# By window, then by class or "all".
Latency = dict[str, dict[str, LatencyEntry]]


def workload(requests: pl.DataFrame) -> Workload | None:
    """Describe the requests of one run, answered or not; None without any."""
    if requests.is_empty():
        return None
    sessions = (
        requests.sort("turn")
        .group_by("session", maintain_order=True)
        .agg(
            pl.len().alias("turns"),
            pl.col("input_tokens").sum().alias("tokens"),
            (pl.col("input_tokens").last() - pl.col("input_tokens").first()).alias(
                "growth"
            ),
        )
    )
    inputs, outputs = requests["input_tokens"], requests["output_tokens"]
    input_sum, output_sum = int(inputs.sum()), int(outputs.sum())
    return Workload(
        requests=requests.height,
        sessions=sessions.height,
        prefill_share=input_sum / (input_sum + output_sum),
        spreads={
            "input tokens": _workload_spread(inputs),
            "output tokens": _workload_spread(outputs),
            "turns per session": _workload_spread(sessions["turns"]),
            "input tokens per session": _workload_spread(sessions["tokens"]),
            "growth per session, tokens": _workload_spread(
                sessions.filter(pl.col("turns") > 1)["growth"]
            ),
        },
    )


def _workload_spread(values: pl.Series) -> WorkloadSpread | None:
    if values.is_empty():
        return None
    numbers = values.to_numpy().astype(float)
    p50, p90 = np.quantile(numbers, (0.5, 0.9))
    spread = (numbers.mean(), p50, p90, numbers.max())
    return WorkloadSpread(*(round(float(x), 1) for x in spread))


def outcomes(requests: pl.DataFrame) -> dict[str, Outcomes]:
    """Count the requests of each arm by outcome, and every way to fail."""
    table: dict[str, Outcomes] = {}
    for arm in requests["arm"].unique(maintain_order=True):
        own = requests.filter(pl.col("arm") == arm)
        counts = dict(own["status"].value_counts().iter_rows())
        bad = own.filter(pl.col("status") != "ok")
        modes = (
            bad.select(
                pl.format("{}: {}", "status", pl.col("error").fill_null("no reason"))
                .str.slice(0, 120)
                .alias("mode")
            )["mode"]
            .value_counts()
            .sort(["count", "mode"], descending=[True, False])
        )
        table[arm] = Outcomes(
            n=own.height,
            ok=counts.get("ok", 0),
            failed=counts.get("failed", 0),
            cancelled=counts.get("cancelled", 0),
            repeats=own["repeat"].n_unique(),
            modes=dict(modes.iter_rows()),
            fallbacks=dict(
                own["fallback"].drop_nulls().value_counts().sort("fallback").iter_rows()
            ),
        )
    return table


WINDOWS = ("steady", "all")


def latency_table(requests: pl.DataFrame, draws: SessionDraws) -> dict[str, Latency]:
    """Compute each arm's quantiles, in the steady window and over all, by class.

    `requests` is a requests_frame. A class or window without a request that ended ok is
    left out.
    """
    table: dict[str, Latency] = {}
    ok = requests.filter(pl.col("status") == "ok")
    for arm in requests["arm"].unique(maintain_order=True):
        own = ok.filter(pl.col("arm") == arm)
        table[arm] = {
            window: _latency_classes(_in_window(own, window), draws)
            for window in WINDOWS
            if _in_window(own, window).height
        }
    return table


def _in_window(requests: pl.DataFrame, window: str) -> pl.DataFrame:
    return requests if window == "all" else requests.filter(pl.col("window") == window)


def _latency_classes(
    requests: pl.DataFrame, draws: SessionDraws
) -> dict[str, LatencyEntry]:
    entries = {}
    for kind in ("all", *CLASSES):
        own = requests if kind == "all" else requests.filter(pl.col("class") == kind)
        if own.height:
            entries[kind] = _latency_entry(own, draws)
    return entries


def _latency_entry(requests: pl.DataFrame, draws: SessionDraws) -> LatencyEntry:
    levels = {
        name: draws.quantiles(requests[name], requests["session"]) for name in LATENCIES
    }
    return LatencyEntry(
        n=requests.height,
        sessions=requests["session"].n_unique(),
        **{name: estimates(quantiles, 4) for name, quantiles in levels.items()},
    )
