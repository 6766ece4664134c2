# SPDX-License-Identifier: Apache-2.0
"""TTFT, TPOT and E2E of requests, from the moments that their sender noted.

TTFT and E2E count from the intended send, so that a late sender does not flatter the
server; as *_sent they count from the actual send. TPOT = (end - first token) / (output
tokens - 1); an answer of one token has none.
"""

from __future__ import annotations

import polars as pl


def latency_columns(output_tokens: str) -> list[pl.Expr]:
    """Compute all latencies in ms; null where a moment is missing.

    The frame has the moments of an `RequestOutcome`, and the column `output_tokens`.
    """
    return [
        _ms("intended_ns", "first_token_ns").alias("ttft_ms"),
        _ms("sent_ns", "first_token_ns").alias("ttft_sent_ms"),
        tpot(_ms("first_token_ns", "end_ns"), pl.col(output_tokens)).alias("tpot_ms"),
        _ms("intended_ns", "end_ns").alias("e2e_ms"),
        _ms("sent_ns", "end_ns").alias("e2e_sent_ms"),
    ]


def tpot(decode: pl.Expr, output_tokens: pl.Expr) -> pl.Expr:
    """Divide the time from first to last token by the tokens after the first."""
    further = output_tokens - 1
    return pl.when(further > 0).then(decode / further)


def tpot_of(first_token: float, end: float, output_tokens: int) -> float | None:
    """Compute the TPOT of one request, in the unit of its moments."""
    further = output_tokens - 1
    return (end - first_token) / further if further > 0 else None


def _ms(start: str, end: str) -> pl.Expr:
    return (pl.col(end) - pl.col(start)) / 1e6
