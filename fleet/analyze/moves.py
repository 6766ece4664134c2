# SPDX-License-Identifier: Apache-2.0
"""Sessions that a policy moved with their KV: what that cost them, and what it brought.

Each moved turn is held against the turn before it, of the same session: the first
token comes later, for the KV has to arrive; the tokens after it come faster, if the new
instance has less to do. A turn that follows another in time is also longer.
"""

from __future__ import annotations

from typing import Any

import polars as pl


def moves(requests: pl.DataFrame) -> dict[str, Any] | None:
    """Of the requests_frame of one arm; None if no session was to move.

    {decided, arrived, moved_tokens, relief_tokens, ttft_added_ms, tpot_saved_ms,
    pairs}: `arrived` those whose KV was used; `moved_tokens` those of their prompts;
    `relief_tokens` by how many fewer tokens were under way at the new instance, mean at
    the decision; the last two are medians over the `pairs` of turns, or None.
    """
    decided = requests.filter(pl.col("moves_from").is_not_null())
    if decided.is_empty():
        return None
    before = ["repeat", "session"]
    ordered = requests.sort(*before, "turn").with_columns(
        (pl.col("ttft_ms") - pl.col("ttft_ms").shift().over(before)).alias("later_ms"),
        (pl.col("tpot_ms").shift().over(before) - pl.col("tpot_ms")).alias("saved_ms"),
    )
    arrived = ordered.filter(
        pl.col("moves_from").is_not_null(), pl.col("prefill_instance").is_not_null()
    )
    pairs = arrived.drop_nulls(["later_ms", "saved_ms"])
    return {
        "decided": decided.height,
        "arrived": arrived.height,
        "moved_tokens": int(arrived["asked_tokens"].sum()),
        "relief_tokens": decided["relief_tokens"].mean(),
        "ttft_added_ms": pairs["later_ms"].median(),
        "tpot_saved_ms": pairs["saved_ms"].median(),
        "pairs": pairs.height,
    }
