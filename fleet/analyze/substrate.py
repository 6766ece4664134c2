# SPDX-License-Identifier: Apache-2.0
"""What each layer below the policy adds: no-op, NIXL, Mooncake, Mooncake fixed.

Arms that differ in their connector alone, in that order; each is compared with the one
before it, on the same requests and with sessions drawn alike. NIXL and Mooncake exclude
each other, so the chain is a way to read the levels, not a sum of parts: Mooncake's
step is against NIXL.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from fleet.analyze.comparison import METRICS, levels_of, same_requests
from fleet.analyze.sessions import SessionDraws
from lab.stats.interval import stated

# In the order of the chain: the connectors (names of configs/connectors) of each.
LAYERS = {
    "plain": (None, "plain"),
    "noop": ("noop",),
    "nixl": ("nixl", "nixl_both"),
    "mooncake": ("mooncake", "mooncake_both"),
    "mooncake, hash walk": ("mooncake_both_hash_sync",),
    "mooncake fixed": ("mooncake_both_fixed",),
}
QUANTILES = ("p50", "p90")


def layer(connector: str | None) -> str | None:
    """Which of LAYERS a connector is; None: none of them."""
    return next((name for name, of in LAYERS.items() if connector in of), None)


def substrate(
    requests: pl.DataFrame,
    arms: dict[str, dict[str, Any]],
    refused: set[str],
    draws: SessionDraws,
) -> list[dict[str, Any]]:
    """Chains of arms of one policy and concurrency, one a metric and quantile.

    `arms` are the document's; those that must not be compared (`refused`) and those
    without a request are in no chain. A chain: {policy, concurrency, metric, quantile,
    steps}; a step: {arm, layer, level, added (to the one before; None for the first)}.
    Fewer than two layers are no chain.
    """
    groups: dict[tuple, dict[str, str]] = {}
    for arm, entry in arms.items():
        usable = arm not in refused and entry["latency"]
        if usable and (found := layer(entry["connector"])):
            key = entry["policy"], entry["concurrency"]
            groups.setdefault(key, {}).setdefault(found, arm)
    chains = []
    for (policy, concurrency), by_layer in groups.items():
        ordered = [(name, by_layer[name]) for name in LAYERS if name in by_layer]
        if len(ordered) < 2:
            continue
        in_chain = pl.col("arm").is_in([arm for _, arm in ordered])
        _, kept = same_requests(requests.filter(in_chain))
        for metric in METRICS:
            levels = [levels_of(kept, arm, metric, draws) for _, arm in ordered]
            chains += [
                {
                    "policy": policy,
                    "concurrency": concurrency,
                    "metric": metric,
                    "quantile": quantile,
                    "steps": _steps(ordered, [one[quantile] for one in levels]),
                }
                for quantile in QUANTILES
            ]
    return chains


def _steps(ordered: list[tuple[str, str]], levels: list) -> list[dict[str, Any]]:
    steps, before = [], None
    for (name, arm), level in zip(ordered, levels, strict=True):
        added = level.minus(before) if level and before else None
        steps.append(
            {
                "arm": arm,
                "layer": name,
                "level": stated(level, 4),
                "added": stated(added, 4),
            }
        )
        before = level
    return steps
