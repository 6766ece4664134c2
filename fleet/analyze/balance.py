# SPDX-License-Identifier: Apache-2.0
"""How evenly the instances were loaded: token imbalance and hotspot index."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fleet.analyze.load import Steps, ongoing_tokens, step_function

Window = tuple[int, int] | None


def token_imbalance(requests: pl.DataFrame, instances: list[str]) -> dict[str, Any]:
    """{tokens: {instance: n}, max_over_min} of prompt and generated tokens, ok only.

    A prompt counts where it was computed. max_over_min is None where an instance
    served nothing; `tokens` is empty where nobody told who served what.
    """
    ok = requests.filter(pl.col("status") == "ok")
    if ok["instance"].null_count() == ok.height > 0:
        return {"tokens": {}, "max_over_min": None}
    generated = pl.col("usage_completion_tokens").fill_null(0)
    parts = pl.concat(
        [
            ok.select("instance", tokens=generated),
            ok.select(
                pl.coalesce("prefill_instance", "instance").alias("instance"),
                tokens=pl.coalesce("usage_prompt_tokens", "input_tokens").fill_null(0),
            ),
        ]
    )
    sums = dict(parts.group_by("instance").agg(pl.col("tokens").sum()).iter_rows())
    tokens = {name: int(sums.get(name, 0)) for name in instances}
    return {"tokens": tokens, "max_over_min": max_over_min(list(tokens.values()))}


def max_over_min(values: list[int]) -> float | None:
    if not values or min(values) <= 0:
        return None
    return round(max(values) / min(values), 4)


def hotspot(
    requests: pl.DataFrame, instances: list[str], window_ns: Window = None
) -> dict[str, Any] | None:
    """{mean, p99} over time of max/mean ongoing tokens; 1 is even, None without any.

    In `window_ns` where one is given: as a run begins and ends, the few requests that
    are under way cannot be even. Time in which nothing was under way does not count.
    """
    steps = step_function(ongoing_tokens(requests), instances)
    return skew(inside(steps, window_ns)) if steps else None


def inside(steps: Steps, window_ns: Window) -> Steps:
    return steps.between(*window_ns) if window_ns else steps


def skew(steps: Steps) -> dict[str, Any] | None:
    """{mean, p99}: max/mean over the instances, weighted by the time it held."""
    mean = steps.load.mean(axis=1)
    busy = (mean > 1e-9) & (steps.held_ns > 0)
    if not busy.any():
        return None
    ratio = steps.load[busy].max(axis=1) / mean[busy]
    held = steps.held_ns[busy]
    order = np.argsort(ratio)
    share = np.cumsum(held[order]) / held.sum()
    at = min(int(np.searchsorted(share, 0.99)), len(order) - 1)
    return {
        "mean": round(float(np.average(ratio, weights=held)), 4),
        "p99": round(float(ratio[order][at]), 4),
    }
