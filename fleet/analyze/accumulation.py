# SPDX-License-Identifier: Apache-2.0
"""How sessions pile up: how many live at each instance over time, with what context.

A session lives at the instance of its latest request, from that request's send until
its next request is sent or, after its last one, until that ends. Its tokens are the
context after that turn: prompt and generated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from fleet.analyze.balance import Window, inside, skew
from fleet.analyze.load import Steps, step_function

CURVE_POINTS = 400


def residence(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals (session, instance, start_ns, end_ns, tokens) of one arm and repeat."""
    placed = requests.filter(
        pl.col("instance").is_not_null() & pl.col("sent_ns").is_not_null()
    ).sort("session", "sent_ns")
    following = pl.col("sent_ns").shift(-1).over("session")
    return placed.select(
        "session",
        "instance",
        start_ns="sent_ns",
        end_ns=pl.coalesce(following, "end_ns", "sent_ns"),
        tokens=pl.coalesce("usage_prompt_tokens", "input_tokens").fill_null(0)
        + pl.col("usage_completion_tokens").fill_null(0),
    )


def accumulation(
    requests: pl.DataFrame, instances: list[str], window_ns: Window = None
) -> dict[str, Any] | None:
    """{sessions: {instance: {mean, peak}}, tokens: ..., sessions_skew, tokens_skew}.

    In `window_ns` where one is given. None where no request was placed.
    """
    lives = residence(requests)
    counted = sessions_over_time(lives, instances)
    weighed = step_function(lives.rename({"tokens": "weight"}), instances)
    if counted is None or weighed is None:
        return None
    counted, weighed = inside(counted, window_ns), inside(weighed, window_ns)
    return {
        "sessions": _by_instance(counted),
        "tokens": _by_instance(weighed),
        "sessions_skew": skew(counted),
        "tokens_skew": skew(weighed),
    }


def sessions_over_time(lives: pl.DataFrame, instances: list[str]) -> Steps | None:
    return step_function(lives.with_columns(weight=pl.lit(1)), instances)


def _by_instance(steps: Steps) -> dict[str, Any]:
    total = max(steps.held_ns.sum(), 1.0)
    mean = (steps.load * steps.held_ns[:, None]).sum(axis=0) / total
    return {
        name: {
            "mean": round(float(mean[column]), 2),
            "peak": int(steps.load[:, column].max()),
        }
        for column, name in enumerate(steps.instances)
    }


def curve(requests: pl.DataFrame, instances: list[str]) -> pl.DataFrame:
    """(t_s, instance, sessions) at CURVE_POINTS evenly spaced moments, for a figure."""
    steps = sessions_over_time(residence(requests), instances)
    if steps is None:
        return pl.DataFrame()
    first, last = steps.at_ns[0], steps.at_ns[-1]
    moments = np.linspace(first, last, CURVE_POINTS).astype(np.int64)
    row = np.searchsorted(steps.at_ns, moments, "right") - 1
    seconds = np.round((moments - first) / 1e9, 3)
    return pl.concat(
        [
            pl.DataFrame(
                {"t_s": seconds, "instance": name, "sessions": steps.load[row, column]}
            )
            for column, name in enumerate(instances)
        ]
    )
