# SPDX-License-Identifier: Apache-2.0
"""Latencies and counts of requests, as the driver recorded them."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from kvtax.records.per_config import Lag, Quantiles
from kvtax.records.requests import DriverEnd, RequestRecord, Requests
from kvtax.stats.quantiles import latency_columns, tpot_of
from kvtax.verdict.latency import latencies_ms, request_counts, send_lag
from kvtax.verdict.trials import LoadedTrial

MS = 1_000_000


def request(phase: str, ttft_ms: float, status: str = "ok") -> RequestRecord:
    """A request of 11 tokens, 2 ms each, sent 1 ms late."""
    first_ns = round(ttft_ms * MS)
    return RequestRecord(
        id=0,
        phase=phase,
        status=status,
        prompt_tokens=4_096,
        output_tokens=11,
        intended_ns=0,
        sent_ns=MS,
        first_token_ns=first_ns,
        end_ns=first_ns + 20 * MS,
    )


def trial(*requests: RequestRecord, **end: Any) -> LoadedTrial:
    counts = {"scheduled": len(requests), "ok": 0, "failed": 0, "cancelled": 0}
    driver = DriverEnd(**counts | {"valid": True} | end)
    records = Requests(len(requests), [], [], list(requests), driver, 0)
    return LoadedTrial("plain", 0, None, None, requests=records)


def test_quantiles_are_of_requests_of_the_open_load_that_ended_ok_on_time():
    good = [request("growth", 5.0), request("plateau", 7.0)]
    others = [request("hold.0.0.8", 99.0), request("growth", 99.0, status="failed")]
    late = trial(request("growth", 99.0), valid=False)
    latencies = latencies_ms([trial(*good, *others), late])
    assert latencies["ttft_ms"] == Quantiles(5.0, 7.0, 7.0)
    assert latencies["tpot_ms"] == Quantiles(2.0, 2.0, 2.0)
    assert latencies["e2e_ms"].p50 == 25.0


def test_without_requests_there_are_no_latencies():
    assert set(latencies_ms([trial()]).values()) == {None}
    assert send_lag([trial()]) is None


def test_requests_are_counted_over_the_repeats_by_how_they_ended():
    first = trial(request("growth", 5.0), request("growth", 5.0, status="failed"))
    counts = request_counts([first, trial(request("hold.0.0.8", 5.0))])
    assert counts == {"scheduled": 3, "ok": 2, "failed": 1, "cancelled": 0}


@pytest.mark.parametrize(("valid", "all_valid"), [(True, True), (False, False)])
def test_the_send_lag_is_that_of_the_worst_repeat_and_valid_if_all_are(
    valid, all_valid
):
    good = trial(lag_ms={"p99": 1.0}, lag_budget_ms=50.0)
    worse = trial(lag_ms={"p99": 3.0}, lag_budget_ms=50.0, valid=valid)
    assert send_lag([good, worse]) == Lag(3.0, 50.0, all_valid)


def test_latencies_count_from_the_intended_and_from_the_actual_send():
    row = {"intended_ns": 0, "sent_ns": MS, "first_token_ns": 5 * MS, "end_ns": 25 * MS}
    frame = pl.DataFrame([row | {"n": 11}]).with_columns(latency_columns("n"))
    names = ("ttft_ms", "ttft_sent_ms", "tpot_ms", "e2e_ms", "e2e_sent_ms")
    assert frame.select(names).row(0) == (5.0, 4.0, 2.0, 25.0, 24.0)


@pytest.mark.parametrize(("tokens", "tpot"), [(11, 2.0), (2, 20.0), (1, None)])
def test_tpot_of_one_request_is_per_token_after_the_first(tokens, tpot):
    assert tpot_of(5.0, 25.0, tokens) == tpot
