# SPDX-License-Identifier: Apache-2.0
"""Latencies of requests, and what a connector adds, worked out by hand."""

from __future__ import annotations

import math
from itertools import count

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.records.per_config import Addition, ConfigEntry
from kvtax.records.requests import DriverEnd, RequestRecord, Requests
from kvtax.stats.quantiles import latency_columns, tpot_of
from kvtax.verdict.latency import (
    latencies_ms,
    log_tpot,
    request_counts,
    requests_to_fill,
    send_lag_ms,
    tpot_addition,
)
from kvtax.verdict.trials import LoadedTrial
from tests.microbench.synthetic import LADDER

MS = 1_000_000
NUMBERS = count()


def request(phase: str, ttft_ms: int = 100, status: str = "ok", **changes):
    """Due at 0, sent 20 ms late, with 5 tokens, 10 ms apart after the first."""
    fields = {
        "prompt_tokens": 4_096,
        "output_tokens": 5,
        "intended_ns": 0,
        "sent_ns": 20 * MS,
        "first_token_ns": ttft_ms * MS,
        "end_ns": (ttft_ms + 40) * MS,
    }
    return RequestRecord(
        id=next(NUMBERS), phase=phase, status=status, **fields | changes
    )


def trial(*requests: RequestRecord, valid: bool = True, p99: float = 1.0, **changes):
    ended = dict.fromkeys(("scheduled", "ok", "failed", "cancelled"), 0)
    lag = {"p50": 0.1, "p90": 0.5, "p99": p99, "max": 2.0}
    end = DriverEnd(**ended, lag_ms=lag, lag_budget_ms=2.0, valid=valid)
    of = Requests(len(requests), [], [], list(requests), end, 0)
    return LoadedTrial("plain", 0, None, None, requests=of, **changes)


def test_quantiles_are_of_requests_of_the_open_load_that_ended_ok_on_time():
    # TTFT 10, 20 ... 110 ms: the median is the sixth, p90 the tenth.
    open_load = [request("growth", 10 * n) for n in range(1, 11)]
    open_load.append(request("plateau", 110))
    left_out = [
        request("growth", 9_000, status="failed"),
        request("growth", 9_000, status="cancelled"),
        request("hold.0.1", 9_000),
        request("fill.0.1", 9_000),
    ]
    late = trial(request("growth", 9_000), valid=False)
    found = latencies_ms(
        [trial(*open_load[:4], *left_out), trial(*open_load[4:]), late]
    )
    assert found["ttft_ms"] == {"p50": 60.0, "p90": 100.0, "p99": 109.0}
    assert found["ttft_sent_ms"] == {"p50": 40.0, "p90": 80.0, "p99": 89.0}
    assert found["e2e_ms"] == {"p50": 100.0, "p90": 140.0, "p99": 149.0}
    assert found["e2e_sent_ms"] == {"p50": 80.0, "p90": 120.0, "p99": 129.0}
    assert found["tpot_ms"] == {"p50": 10.0, "p90": 10.0, "p99": 10.0}


def test_the_plateau_has_a_tpot_of_its_own():
    slow = request("plateau", end_ns=180 * MS)
    found = latencies_ms([trial(request("growth"), slow)])
    assert found["tpot_plateau_ms"]["p50"] == 20.0
    assert found["tpot_ms"]["p50"] == 15.0
    assert latencies_ms([trial(request("growth"))])["tpot_plateau_ms"] is None


def test_the_tpot_of_holds_is_that_of_the_requests_which_decode_at_the_stated_level():
    # 10 us a token; the stated level is 3, with 8 requests.
    decode = request("fill.5.3.8.decoders")
    others = [
        request(phase, end_ns=999 * MS)
        for phase in ("fill.5.3.8", "hold.5.3.8", "fill.4.2.8.decoders", "growth")
    ]
    many = request("fill.7.3.32.decoders", end_ns=999 * MS)
    failed = request("fill.5.3.8.decoders", status="failed", end_ns=999 * MS)
    held = trial(decode, *others, many, failed, steps=pl.DataFrame())
    (log_us,) = log_tpot([held, trial(*others, steps=pl.DataFrame())], LADDER)
    assert log_us == pytest.approx(math.log(10_000), abs=1e-6)
    # Of a trial that failed there is none.
    assert log_tpot([trial(decode)], LADDER) == []


def test_without_requests_there_are_no_latencies():
    assert set(latencies_ms([trial()]).values()) == {None}


def test_requests_are_counted_over_the_repeats_by_how_they_ended():
    trials = [
        trial(
            request("growth"), request("hold.0.0"), request("growth", status="failed")
        ),
        trial(request("growth", status="cancelled")),
        LoadedTrial("plain", 2, "never finished", None),
    ]
    counts = {"scheduled": 4, "ok": 2, "failed": 1, "cancelled": 1}
    assert request_counts(trials) == counts


def test_the_send_lag_is_that_of_the_worst_repeat_and_valid_if_all_are():
    worst = send_lag_ms([trial(p99=1.0), trial(p99=3.0, valid=False), trial(p99=2.0)])
    assert worst == {
        "p50": 0.1,
        "p90": 0.5,
        "p99": 3.0,
        "max": 2.0,
        "budget": 2.0,
        "valid": False,
    }
    assert send_lag_ms([trial(), trial()])["valid"]
    assert send_lag_ms([LoadedTrial("plain", 0, "failed", None)]) is None


@pytest.mark.parametrize(
    ("blocks", "prompts", "expected"),
    [
        # 4,096 tokens are 256 blocks of 16.
        (12_800, [4_096], {"0": 50.0, "0.5": 100.0, "0.9": 500.0}),
        (256, [4_096, 4_096, 64], {"0": 1.0, "0.5": 2.0, "0.9": 10.0}),
        (10, [8], {"0": 10.0, "0.5": 20.0, "0.9": 100.0}),
        (0, [4_096], None),
        (256, [], None),
    ],
)
def test_requests_that_fill_the_cache_are_fewer_where_less_is_cached(
    blocks, prompts, expected
):
    requests = [request("growth", prompt_tokens=n) for n in prompts]
    ignored = request("hold.0.0", prompt_tokens=160_000)
    late = trial(request("growth", prompt_tokens=160_000), valid=False)
    found = requests_to_fill(blocks, [trial(*requests, ignored), late], 16)
    assert found == expected


def entry(scheduler_us: float, worker_us: float, **tpot_ms) -> ConfigEntry:
    """A config whose step has a scheduler's side and a worker's."""
    worker = {
        "bind": 0.1 * worker_us,
        "start_load_kv": 0.2 * worker_us,
        "wait_for_save": None,
        "get_finished": 0.3 * worker_us,
        "execute_model_rest": 0.4 * worker_us,
    }
    return ConfigEntry(
        slope_us_per_1k_blocks={},
        verdict_of={},
        requests={},
        records={},
        lag_ms=None,
        attribution_us=worker | {"step": scheduler_us + worker_us},
        **{name: {"p50": p50} for name, p50 in tpot_ms.items()},
    )


def test_a_connector_adds_to_tpot_what_no_forward_hides():
    """A scheduler side of 2 or 12 ms, a worker side of 3 or 4, of which 1 is forward.

    Synchronous steps add 11 ms in all. Asynchronous ones take the longer side: with a
    forward of 7 ms, 12 instead of 9; with one of 25 ms, 28 instead of 27.
    """
    plain, ours = entry(2_000, 3_000), entry(12_000, 4_000)
    found = tpot_addition(plain, ours, own_forward_ms=1.0)
    assert found.forward_ms == {
        "1": {"sync": Addition(11.0, 220.0), "async": Addition(9.0, 300.0)},
        "7": {"sync": Addition(11.0, 100.0), "async": Addition(3.0, 33.333)},
        "25": {"sync": Addition(11.0, 37.931), "async": Addition(1.0, 3.704)},
    }
    assert found.measured_tpot_p50_ms is None


def test_the_measured_addition_is_of_the_plateau_or_of_all_requests():
    plain = entry(1.0, 1.0, tpot_ms=5.0, tpot_plateau_ms=6.0)
    ours = entry(1.0, 1.0, tpot_ms=5.5, tpot_plateau_ms=8.0)
    found = tpot_addition(plain, ours, 0.0)
    assert (found.measured_tpot_p50_ms, found.measured_phase) == (2.0, "plateau")
    ours.tpot_plateau_ms = None
    found = tpot_addition(plain, ours, 0.0)
    assert (found.measured_tpot_p50_ms, found.measured_phase) == (0.5, "all")
    ours.attribution_us = None
    assert tpot_addition(plain, ours, 0.0) is None


MOMENTS = ("intended_ns", "sent_ns", "first_token_ns", "end_ns")
COLUMNS = dict.fromkeys((*MOMENTS, "tokens"), pl.Int64)
NAMES = ["ttft_ms", "ttft_sent_ms", "tpot_ms", "e2e_ms", "e2e_sent_ms"]


def latencies(*moments_and_tokens: int | None) -> tuple[float | None, ...]:
    frame = pl.DataFrame([moments_and_tokens], schema=COLUMNS, orient="row")
    (row,) = frame.select(latency_columns("tokens")).rows()
    return row


@pytest.mark.parametrize(
    ("intended_ms", "sent_ms", "first_ms", "end_ms", "tokens", "expected_ms"),
    [
        (1_000, 1_010, 1_110, 1_310, 5, (110, 100, 50, 310, 300)),
        # Sent two seconds late: the client waited, though the server did not.
        (1_000, 3_000, 3_040, 3_100, 4, (2_040, 40, 20, 2_100, 100)),
        (0, 0, 30, 32, 2, (30, 30, 2, 32, 32)),
        # One token: the first is the last.
        (0, 5, 30, 30, 1, (30, 25, None, 30, 25)),
        (0, 5, 30, 40, None, (30, 25, None, 40, 35)),
        (0, 5, 30, 40, 0, (30, 25, None, 40, 35)),
        # Given up before the first token; never sent.
        (0, 5, None, 40, 3, (None, None, None, 40, 35)),
        (0, None, None, None, None, (None, None, None, None, None)),
    ],
)
def test_latencies_count_from_the_intended_and_from_the_actual_send(
    intended_ms, sent_ms, first_ms, end_ms, tokens, expected_ms
):
    moments = (intended_ms, sent_ms, first_ms, end_ms)
    ns = [None if ms is None else ms * 1_000_000 for ms in moments]
    assert latencies(*ns, tokens) == expected_ms


@given(
    st.lists(st.integers(0, 10**15), min_size=4, max_size=4).map(sorted),
    st.integers(2, 10_000),
)
def test_the_time_of_a_request_is_that_of_its_first_token_and_of_the_further_ones(
    moments_ns, tokens
):
    ttft, _, tpot, e2e, _ = latencies(*moments_ns, tokens)
    assert ttft + (tokens - 1) * tpot == pytest.approx(e2e)
    *_, first_ns, end_ns = moments_ns
    assert tpot_of(first_ns / 1e6, end_ns / 1e6, tokens) == pytest.approx(
        tpot, abs=1e-6
    )


@pytest.mark.parametrize(
    ("tokens", "tpot"), [(3, 100.0), (2, 200.0), (1, None), (0, None)]
)
def test_tpot_of_one_request_is_per_token_after_the_first(tokens, tpot):
    assert tpot_of(50.0, 250.0, tokens) == tpot


def test_the_columns_have_the_names_of_the_documents():
    frame = pl.DataFrame(schema=COLUMNS)
    assert frame.select(latency_columns("tokens")).columns == NAMES
