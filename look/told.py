# SPDX-License-Identifier: Apache-2.0
"""What is told of an instance: computed once, for the terminal and for the page."""

from __future__ import annotations

from dataclasses import dataclass

from look.clients import outside
from look.cost import Cost, cost, felt
from look.instances import Instance
from look.moves import Moves, moves


@dataclass(frozen=True)
class Told:
    """An instance and what was found of it; `cost` is None without steps.

    `moves` are by time: `connector_us` and each of the connector's methods. `felt` is
    the connector's share of what requests waited for, `outside` what their clients did.
    """

    instance: Instance
    cost: Cost | None
    moves: dict[str, Moves]
    felt: dict[str, dict[str, float]]
    outside: list[list]

    @property
    def title(self) -> str:
        """Which server it is, and how much of it was recorded."""
        instance = self.instance
        release = f"vLLM {instance.vllm_version or 'of unknown release'}"
        if self.cost is None:
            return f"{instance.name}: {release}, no steps"
        every = instance.header.every
        steps = f"{self.cost.steps:,} steps" + (
            f", one in {every}," if every > 1 else ""
        )
        return (
            f"{instance.name}: {release}, {steps} in {self.cost.seconds:,.0f} s, "
            f"{instance.requests.height:,} requests"
        )


def told_of(instance: Instance) -> Told:
    """All that is told of it."""
    times = ("connector_us", *instance.methods)
    return Told(
        instance,
        cost(instance),
        moves(instance.steps, times),
        felt(instance.requests),
        outside(instance.requests),
    )
