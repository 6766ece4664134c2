# SPDX-License-Identifier: Apache-2.0
"""Request latencies as the driver saw them.

Requests that ended ok, of the growth and plateau phases, in trials whose requests were
sent on time.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvtax.records.per_config import Lag, Quantiles
from kvtax.records.requests import Phase
from kvtax.stats.quantiles import latency_columns, quantiles
from kvtax.verdict.trials import LoadedTrial

MOMENTS = ("intended_ns", "sent_ns", "first_token_ns", "end_ns")
COLUMNS = {name: pl.Int64 for name in (*MOMENTS, "output_tokens")}
DIGITS = 4


def latencies_ms(trials: Sequence[LoadedTrial]) -> dict[str, Quantiles | None]:
    """Return TTFT, TPOT and E2E over the repeats; None without a request."""
    ok = [
        tuple(getattr(request, name) for name in COLUMNS)
        for trial in trials
        if trial.requests and not trial.late
        for request in trial.requests.requests
        if request.status == "ok"
        and Phase.of(request.phase) in (Phase.GROWTH, Phase.PLATEAU)
    ]
    frame = pl.DataFrame(ok, schema=COLUMNS, orient="row")
    ms = frame.with_columns(latency_columns("output_tokens"))
    names = ("ttft_ms", "tpot_ms", "e2e_ms")
    return {name: quantiles(ms[name], DIGITS) for name in names}


def request_counts(trials: Sequence[LoadedTrial]) -> dict[str, int]:
    """Return scheduled, ok, failed, cancelled over the repeats, from the records."""
    counts = dict.fromkeys(("scheduled", "ok", "failed", "cancelled"), 0)
    for trial in trials:
        if trial.requests is None:
            continue
        counts["scheduled"] += trial.requests.scheduled
        for request in trial.requests.requests:
            if request.status is not None:
                counts[request.status] += 1
    return counts


def send_lag(trials: Sequence[LoadedTrial]) -> Lag | None:
    """Return the worst send lag of the repeats, with its budget."""
    ends = [t.requests.end for t in trials if t.requests and t.requests.end]
    lags = [(end.lag_ms.get("p99"), end) for end in ends if end.lag_ms]
    if not lags:
        return None
    p99, worst = max(lags, key=lambda lag: lag[0] or 0.0)
    return Lag(p99, worst.lag_budget_ms, all(e.valid is not False for _, e in lags))
