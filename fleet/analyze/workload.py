# SPDX-License-Identifier: Apache-2.0
"""What was replayed: lengths, and how sessions are made of them."""

from __future__ import annotations

from typing import Any

import polars as pl

SPREADS = ("mean", "p50", "p90", "max")


def workload(requests: pl.DataFrame) -> dict[str, Any] | None:
    """Of the requests of one run, answered or not; None without any.

    {requests, sessions, prefill_share, spreads: {name: {mean, p50, p90, max}}}.
    `prefill_share`: input tokens of all tokens. Growth: from a session's first prompt
    to its last one, of those with several turns.
    """
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
    return {
        "requests": requests.height,
        "sessions": sessions.height,
        "prefill_share": inputs.sum() / (inputs.sum() + outputs.sum()),
        "spreads": {
            "input tokens": _spread(inputs),
            "output tokens": _spread(outputs),
            "turns per session": _spread(sessions["turns"]),
            "input tokens per session": _spread(sessions["tokens"]),
            "growth per session, tokens": _spread(
                sessions.filter(pl.col("turns") > 1)["growth"]
            ),
        },
    }


def _spread(values: pl.Series) -> dict[str, float] | None:
    if values.is_empty():
        return None
    found = (
        values.mean(),
        values.quantile(0.5, "linear"),
        values.quantile(0.9, "linear"),
        values.max(),
    )
    return {name: round(float(x), 1) for name, x in zip(SPREADS, found, strict=True)}
