# SPDX-License-Identifier: Apache-2.0
"""What each layer below the policy adds: arms that differ in their connector alone.

A connector's config says where it stands (`layer` of its `[report]` table), and each is
compared with the one before it, on the same requests and with sessions drawn alike.
Connectors may exclude each other, as NIXL and Mooncake do: then a step from one to the
other is a difference of two levels, not the cost of a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl

from fleet.analyze.common import same_requests
from fleet.analyze.comparison import levels_of
from fleet.analyze.frames import TITLES
from fleet.analyze.runs import Spreads
from fleet.analyze.sessions import SessionDraws
from lab.records.arm import ArmRecord
from lab.records.roles import role_in_toml
from lab.stats.interval import stated

QUANTILES = ("p50", "p90")


class Layer(NamedTuple):
    """Where an arm's connector stands, and what it is called there."""

    place: int
    name: str


def layer_of(info: ArmRecord) -> Layer | None:
    """None for a connector that has no place in the chain. Raises ConfigError."""
    if info.connector is None:
        return None
    role = info.report or role_in_toml(info.connector)
    if role.layer is None:
        return None
    return Layer(role.layer, role.label or info.connector)


def substrate(
    requests: pl.DataFrame,
    arms: dict[str, dict[str, Any]],
    layers: dict[str, Layer | None],
    refused: set[str],
    draws: SessionDraws,
    spreads: Spreads,
) -> list[dict[str, Any]]:
    """Chains of arms of one policy and concurrency, one per metric and quantile.

    `arms` are the document's, `layers` theirs. Arms that must not be compared
    (`refused`) and those without a request are in no chain. A chain: {policy,
    concurrency, metric, quantile, steps}; a step: {arm, place, layer, level, added (to
    the one before; None for the first)}. Fewer than two layers are no chain.
    """
    groups: dict[tuple, dict[Layer, str]] = {}
    for arm, entry in arms.items():
        usable = arm not in refused and entry["latency"]
        if usable and (found := layers[arm]):
            key = entry["policy"], entry["concurrency"]
            groups.setdefault(key, {}).setdefault(found, arm)
    chains = []
    for (policy, concurrency), by_layer in groups.items():
        ordered = sorted(by_layer.items())
        if len(ordered) < 2:
            continue
        in_chain = pl.col("arm").is_in([arm for _, arm in ordered])
        _, kept = same_requests(requests.filter(in_chain))
        for metric in TITLES:
            levels = [
                levels_of(kept, arm, metric, draws, spreads) for _, arm in ordered
            ]
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


def _steps(ordered: list[tuple[Layer, str]], levels: list) -> list[dict[str, Any]]:
    steps, before = [], None
    for (layer, arm), level in zip(ordered, levels, strict=True):
        added = level.minus(before) if level and before else None
        step = {"arm": arm, "place": layer.place, "layer": layer.name}
        steps.append(step | {"level": stated(level, 4), "added": stated(added, 4)})
        before = level
    return steps
