# SPDX-License-Identifier: Apache-2.0
"""Cost of a step at the stated |cache|, comparable between configs.

The stated |cache| is the highest level that is held below a full cache. Batch sizes are
alike in every config: as many requests decode in each hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from kvtax.stats.distribution import Floats
from kvtax.steps.parts import attributed
from kvtax.steps.trial_steps import STEP_TIMES
from kvtax.verdict.metrics import number

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Quantiles of 100,000 steps are as good as of millions; every k-th step is kept.
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Level:
    """Decode-only steps of one config at the stated |cache|."""

    steps: pl.DataFrame

    @classmethod
    def of(cls, held: pl.DataFrame, level: int) -> Level | None:
        """Select the steps of a level from those that are held; None without any."""
        own = held.filter("decode_only", pl.col("level") == level)
        return cls(thin(own, MAX_STEPS)) if own.height else None

    @property
    def cache_blocks(self) -> int:
        return round(number(self.steps["cache_blocks"].median()))

    def quantiles(self, time: str) -> dict[str, float] | None:
        """p50, p90, p99 of `time` in us, None where it was not measured."""
        values = self.steps[time].drop_nulls()
        if not len(values):
            return None
        return {
            name: round(number(values.quantile(q, "higher")), 3)
            for name, q in QUANTILES.items()
        }

    def log_of_servers(self, time: str) -> Floats:
        """Return the log of each server's median of `time` in us: (servers,)."""
        of_servers = (
            self.steps.group_by("repeat").agg(pl.col(time).median()).sort("repeat")
        )
        known = of_servers[time].drop_nulls().cast(pl.Float64).to_numpy()
        return np.asarray(np.log(known[known > 0]), float)

    def attribution_us(self) -> dict[str, float | None]:
        """Mean parts of the middle half of the steps, which sum to their step time.

        The mean over the steps whose step_us lies between its 25th and 75th
        percentile (interquartile mean): means add up, and the tails are out.
        """
        whole = self.steps
        if whole["execute_model_us"].null_count() < whole.height:
            whole = whole.filter(pl.col("execute_model_us").is_not_null())
        low, high = (whole["step_us"].quantile(q, "higher") for q in (0.25, 0.75))
        middle = whole.filter(pl.col("step_us").is_between(low, high))

        def mean(name: str) -> float | None:
            values = middle[name].cast(pl.Float64)
            if values.null_count() == len(values):
                return None
            return number(values.fill_null(0).mean())

        means = {name: mean(name) for name in STEP_TIMES}
        return attributed(means)


def thin(steps: pl.DataFrame, most: int) -> pl.DataFrame:
    """Every k-th step, so that at most `most` are left."""
    every = -(-steps.height // most) if steps.height else 1
    return steps if every == 1 else steps.gather_every(every)
