# SPDX-License-Identifier: Apache-2.0
"""What a step of an instance costs, part by part, and who felt it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from look.exposed import exposed_per_step
from look.instances import Instance

PARTS = {
    "model_us": "model",
    "scheduler_us": "scheduler",
    "connector_us": "connector",
    "other_us": "other",
}


@dataclass(frozen=True)
class Part:
    """Times in us per step, over all steps; `share` of the time of all steps."""

    name: str
    column: str
    calls_per_step: float | None
    mean_us: float
    p50_us: float
    p99_us: float
    most_us: float
    share: float
    exposed_us: float | None = None


@dataclass(frozen=True)
class Cost:
    """Of one instance. `connector_ms_per_s` is per second in which steps ran.

    `exposed_us` of a part is what a device beside the host waited for it
    (look.exposed); None where no device was recorded.
    """

    steps: int
    seconds: float
    step: Part
    parts: list[Part]
    methods: list[Part]
    connector_ms_per_s: float


def cost(instance: Instance) -> Cost | None:
    """None without steps. Methods are in order of what they take, the most first."""
    steps = instance.steps
    if not steps.height:
        return None
    whole = _part(steps, "step_us", "step", 1.0)
    total = float(steps["step_us"].sum()) or 1.0
    felt_us = exposed_per_step(steps, instance.device)
    methods = [
        replace(
            _part(steps, name, name.removesuffix("_us"), total),
            exposed_us=felt_us.get(name),
        )
        for name in instance.methods
    ]
    connector_us = float(steps["connector_us"].sum())
    return Cost(
        steps=steps.height,
        seconds=(steps["end_ns"].max() - steps["t_ns"][0]) / 1e9,
        step=replace(whole, share=1.0),
        parts=[
            replace(_part(steps, name, told, total), exposed_us=felt_us.get(name))
            for name, told in PARTS.items()
        ],
        methods=sorted(methods, key=lambda part: -part.mean_us),
        connector_ms_per_s=1e3 * connector_us / total,
    )


def _part(steps: pl.DataFrame, column: str, name: str, total: float) -> Part:
    us = steps[column]
    p50_us, p99_us = quantiles(us, (0.5, 0.99))
    calls = column.removesuffix("_us") + "_calls"
    return Part(
        name=name,
        column=column,
        calls_per_step=steps[calls].mean() if calls in steps.columns else None,
        mean_us=float(us.mean() or 0),
        p50_us=p50_us,
        p99_us=p99_us,
        most_us=float(us.max() or 0),
        share=float(us.sum()) / total,
    )


def quantiles(us: pl.Series, shares: Sequence[float]) -> list[float]:
    """The values nearest to these quantiles, as Series.quantile has them; of a column
    without nulls. All at once takes half the time."""
    at = [math.floor((len(us) - 1) * share + 0.5) for share in shares]
    return np.partition(us.to_numpy(), at)[at].tolist()


def felt(requests: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Of TTFT and of all of a request's time: the connector's share, its p50 and p99.

    A request that waited 3 ms for the connector's calls, of 100 ms, felt 0.03.
    """
    told = {}
    for span, whole in (("ttft", "ttft_us"), ("e2e", "e2e_us")):
        column = f"{span}.connector_us"
        if column not in requests.columns:
            continue
        share = (requests[column] / requests[whole]).drop_nulls()
        if len(share):
            told[span] = {
                "p50": float(share.quantile(0.5)),
                "p99": float(share.quantile(0.99)),
            }
    return told


def waited_most(requests: pl.DataFrame, count: int) -> pl.DataFrame:
    """The requests that waited longest for the connector's calls."""
    if "e2e.connector_us" not in requests.columns:
        return requests.head(0)
    return requests.sort("e2e.connector_us", descending=True).head(count)
