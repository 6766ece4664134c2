# SPDX-License-Identifier: Apache-2.0
"""Rank the arms of each concurrency by mean E2E, against the best of them.

All arms of a concurrency are compared over the same requests, request by request. An
arm whose comparison was refused has no rank.
"""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.stats.quantiles import MIN_REQUESTS, weighted_quantiles

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.comparison import Comparison, paired_means, verdict
from kvtax_fleet.analyze.frames import same_requests

BEST = "best"


class Rank(msgspec.Struct, kw_only=True):
    """An arm beside the best of its concurrency."""

    arm: str
    """The arm."""
    policy: str | None
    """Its policy."""
    concurrency: int | None
    """Requests in flight per instance; in an open loop at most."""
    n: int
    """Requests compared, each in every repeat of every arm."""
    repeats: int
    """Repeats they come from."""
    e2e_ms: float
    """Mean E2E."""
    ttft_p90_ms: float | None
    """90th percentile of TTFT; null with too few requests."""
    against_best: Estimate | None
    """Mean E2E in % of the best arm's; null for the best itself."""
    verdict: str
    """`best`, or as in `comparisons`."""


def ranking(
    runs: list[ArmRun], requests: pl.DataFrame, compared: list[Comparison]
) -> list[Rank]:
    """Rank the arms, the best of each concurrency first; nothing for a single arm."""
    infos = {run.info.arm: run.info for run in runs}
    is_virtual = any(info.virtual for info in infos.values())
    left_out = {c.arm for c in compared if c.refused}
    groups: dict[int | None, list[str]] = {}
    for arm in requests["arm"].unique(maintain_order=True):
        if arm not in left_out:
            groups.setdefault(infos[arm].concurrency, []).append(arm)
    reach = [0.0, 0.0] if is_virtual else _reach(requests, compared)
    ranks = []
    for arms in groups.values():
        _, kept = same_requests(requests.filter(pl.col("arm").is_in(arms)))
        means = dict(
            kept.group_by("arm").agg(pl.col("e2e_ms").mean()).sort("e2e_ms").iter_rows()
        )
        if len(means) < 2:
            continue
        best = next(iter(means))
        for arm, mean in means.items():
            known = None if arm == best else paired_means(kept, arm, best, "e2e_ms")
            percent = known.percent if known else None
            own = kept.filter(pl.col("arm") == arm)
            ranks.append(
                Rank(
                    arm=arm,
                    policy=infos[arm].policy,
                    concurrency=infos[arm].concurrency,
                    n=own["id"].n_unique(),
                    repeats=own["repeat"].n_unique(),
                    e2e_ms=round(mean, 3),
                    ttft_p90_ms=_p90(own["ttft_ms"].drop_nulls()),
                    against_best=percent,
                    verdict=BEST if arm == best else verdict(percent, reach),
                )
            )
    return ranks


def _reach(requests: pl.DataFrame, compared: list[Comparison]) -> list[float] | None:
    """Return what equal arms may differ by in %: the widest interval of A/A pairs."""
    edges = [0.0]
    for pair in compared:
        if pair.same and not pair.refused:
            both = pl.col("arm").is_in([pair.arm, pair.baseline])
            _, kept = same_requests(requests.filter(both))
            known = paired_means(kept, pair.arm, pair.baseline, "e2e_ms")
            edges += map(abs, (known and known.percent.ci95) or ())
    return [-max(edges), max(edges)] if len(edges) > 1 else None


def _p90(values: pl.Series) -> float | None:
    if len(values) < MIN_REQUESTS["p90"]:
        return None
    numbers = values.to_numpy().astype(float)
    return round(weighted_quantiles(numbers, np.ones(len(numbers)), (0.9,))[0], 3)
