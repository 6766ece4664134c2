# SPDX-License-Identifier: Apache-2.0
"""What became of the requests of each arm: OK of N, and every way to fail, counted."""

from __future__ import annotations

from typing import Any

import polars as pl


def outcomes(requests: pl.DataFrame) -> dict[str, Any]:
    """{arm: {n, ok, failed, cancelled, repeats, modes, fallbacks}}.

    `modes`: {"status: error": count}; `fallbacks`: why prefills that were to be done
    elsewhere were not, {reason: count}.
    """
    table = {}
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
        table[arm] = {
            "n": own.height,
            "ok": counts.get("ok", 0),
            "failed": counts.get("failed", 0),
            "cancelled": counts.get("cancelled", 0),
            "repeats": own["repeat"].n_unique(),
            "modes": dict(modes.iter_rows()),
            "fallbacks": dict(
                own["fallback"].drop_nulls().value_counts().sort("fallback").iter_rows()
            ),
        }
    return table
