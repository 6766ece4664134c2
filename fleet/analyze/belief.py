# SPDX-License-Identifier: Apache-2.0
"""Did the proxy know what was cached? Its belief against what the server then said.

Belief: cached tokens of the prompt at the chosen instance, in the recorded snapshot.
Truth: cached tokens in the usage of the same request. Requests whose prompt came from
elsewhere are left out, as the server counts what it was sent as cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl


def belief(requests: pl.DataFrame, block_tokens: int) -> dict[str, Any] | None:
    """{n, exact, too_high, too_low, mean_error_tokens, mean_abs_error_tokens, p99_...}.

    `exact`: the share within one block; error = belief - truth. None without any pair.
    """
    known = requests.filter(
        pl.col("believed_cached").is_not_null()
        & pl.col("cached_tokens").is_not_null()
        & pl.col("prefill_instance").is_null()
        & pl.col("read_from").is_null()
        & (pl.col("status") == "ok")
    )
    if known.is_empty():
        return None
    error = (known["believed_cached"] - known["cached_tokens"]).to_numpy().astype(float)
    off = np.abs(error) > block_tokens
    return {
        "n": known.height,
        "exact": round(float((~off).mean()), 5),
        "too_high": round(float((off & (error > 0)).mean()), 5),
        "too_low": round(float((off & (error < 0)).mean()), 5),
        "mean_error_tokens": round(float(error.mean()), 2),
        "mean_abs_error_tokens": round(float(np.abs(error).mean()), 2),
        "p99_abs_error_tokens": round(float(np.quantile(np.abs(error), 0.99)), 1),
    }
