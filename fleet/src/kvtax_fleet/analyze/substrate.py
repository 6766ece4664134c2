# SPDX-License-Identifier: Apache-2.0
"""Cost of each layer below the policy, from arms that differ in their connector.

A connector's config says where it stands (`layer` of its `[report]` table), and each is
compared with the one before it, on the same requests and with sessions drawn alike.
Connectors may exclude each other, as NIXL and Mooncake do: then a step from one to the
other is a difference of two levels, not the cost of a part.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import polars as pl
from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import Distribution
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze.comparison import Spreads, levels_of
from kvtax_fleet.analyze.frames import TITLES, estimate, same_requests
from kvtax_fleet.records.arm import ArmRecord

QUANTILES = ("p50", "p90")


class SubstrateStep(msgspec.Struct):
    """One connector in a chain."""

    arm: str
    """The arm."""
    place: int
    """Place in the chain, lowest first."""
    layer: str
    """Label of the connector."""
    level: Estimate | None
    """The metric's quantile, in ms."""
    added: Estimate | None
    """To the connector before; null for the first."""


class SubstrateChain(msgspec.Struct):
    """Arms of one policy and concurrency that differ in their connector alone."""

    policy: str | None
    """Their policy."""
    concurrency: int | None
    """Their requests in flight per instance."""
    metric: str
    """Which latency."""
    quantile: str
    """Which quantile of it."""
    steps: list[SubstrateStep]
    """One entry per connector."""


class Layer(NamedTuple):
    """Place of an arm's connector in the stack, and its label."""

    place: int
    name: str


def layer_of(info: ArmRecord) -> Layer | None:
    """Return the connector's place in the chain; None if it has none."""
    role = info.report
    if info.connector is None or role is None or role.layer is None:
        return None
    return Layer(role.layer, role.label or info.connector)


def substrate(
    requests: pl.DataFrame,
    layers: dict[str, tuple[Layer, str | None, int | None]],
    draws: SessionDraws,
    spreads: Spreads,
) -> list[SubstrateChain]:
    """Make a chain for each policy and concurrency, metric and quantile.

    `layers` has the layer, policy and concurrency of the arms that may be in a chain.
    Fewer than two layers are no chain.
    """
    groups: dict[tuple[str | None, int | None], dict[Layer, str]] = {}
    for arm, (layer, policy, concurrency) in layers.items():
        groups.setdefault((policy, concurrency), {}).setdefault(layer, arm)
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
            for at in QUANTILES:
                steps = _steps(ordered, [quantiles[at] for quantiles in levels])
                chains.append(SubstrateChain(policy, concurrency, metric, at, steps))
    return chains


def _steps(
    ordered: list[tuple[Layer, str]], levels: list[Distribution | None]
) -> list[SubstrateStep]:
    steps = []
    before: Distribution | None = None
    for (layer, arm), level in zip(ordered, levels, strict=True):
        added = level.minus(before) if level and before else None
        steps.append(
            SubstrateStep(
                arm=arm,
                place=layer.place,
                layer=layer.name,
                level=estimate(level, 4),
                added=estimate(added, 4),
            )
        )
        before = level
    return steps
