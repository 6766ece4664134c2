# SPDX-License-Identifier: Apache-2.0
"""Load over time: how much is under way at each instance at every moment.

Sums of intervals, each with a weight and an owner, are step functions; everything here
that asks about "load" or "concurrent" is one of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """`load[k]` (instances,) holds from `at_ns[k]` (k,) to `at_ns[k + 1]`."""

    at_ns: Ints
    load: Floats
    instances: list[str]

    @property
    def held_ns(self) -> Floats:
        """How long each load held, (k,); the last one 0."""
        return np.diff(self.at_ns, append=self.at_ns[-1:]).astype(float)

    def mean_between(self, instance: str, start_ns: Ints, end_ns: Ints) -> Floats:
        """Mean load at `instance` over each interval (n,), intervals not empty."""
        column = self.load[:, self.instances.index(instance)]
        area = np.concatenate([[0.0], np.cumsum(column[:-1] * self.held_ns[:-1])])

        def until(at_ns: Ints) -> Floats:
            return np.interp(at_ns, self.at_ns, area)

        return (until(end_ns) - until(start_ns)) / (end_ns - start_ns)

    def between(self, start_ns: int, end_ns: int) -> Steps:
        """The same in [start_ns, end_ns] only."""
        inside = (self.at_ns > start_ns) & (self.at_ns < end_ns)
        first = max(int(np.searchsorted(self.at_ns, start_ns, "right")) - 1, 0)
        load = np.concatenate([self.load[first : first + 1], self.load[inside]])
        at = np.concatenate([[start_ns], self.at_ns[inside], [end_ns]])
        return Steps(at, np.concatenate([load, load[-1:]]), self.instances)


def step_function(intervals: pl.DataFrame, instances: list[str]) -> Steps | None:
    """Sum of `intervals` (start_ns, end_ns, weight, instance); None without any.

    Intervals of instances that are not named, or that have no start or end, are left
    out.
    """
    known = intervals.drop_nulls(["start_ns", "end_ns", "weight"]).filter(
        pl.col("instance").is_in(instances)
    )
    if known.is_empty():
        return None
    edges = pl.concat(
        [
            known.select("instance", at="start_ns", change=pl.col("weight")),
            known.select("instance", at="end_ns", change=-pl.col("weight")),
        ]
    ).sort("at")
    at_ns, place = np.unique(edges["at"].to_numpy(), return_inverse=True)
    column = (
        edges["instance"]
        .replace_strict({n: i for i, n in enumerate(instances)}, return_dtype=pl.Int64)
        .to_numpy()
    )
    change = np.zeros((len(at_ns), len(instances)))
    np.add.at(change, (place, column), edges["change"].to_numpy().astype(float))
    return Steps(at_ns, np.cumsum(change, axis=0), instances)


def ongoing_tokens(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals of the tokens under way: prompt and asked output, from send to end.

    Where the prompt is computed on another instance, it also weighs there until the
    first token.
    """
    tokens = pl.coalesce("usage_prompt_tokens", "input_tokens")
    serving = requests.select(
        "instance",
        start_ns="sent_ns",
        end_ns="end_ns",
        weight=tokens + pl.col("output_tokens"),
    )
    elsewhere = requests.filter(pl.col("prefill_instance").is_not_null()).select(
        instance="prefill_instance",
        start_ns="sent_ns",
        end_ns=pl.coalesce("first_token_ns", "end_ns"),
        weight=tokens,
    )
    return pl.concat([serving, elsewhere])


def pending_prefill(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals of new tokens, from send to first token, where they are computed."""
    return requests.select(
        instance=pl.coalesce("prefill_instance", "instance"),
        start_ns="sent_ns",
        end_ns=pl.coalesce("first_token_ns", "end_ns"),
        weight="new_tokens",
    )
