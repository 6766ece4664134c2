# SPDX-License-Identifier: Apache-2.0
"""Latencies of a request, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.stats.quantiles import latency_columns, tpot_of

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
