# SPDX-License-Identifier: Apache-2.0
"""The answer for one instance: a sentence, and the remedy of each known cost."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtax.look.instance_summary import COVARIATES, Cost, InstanceSummary
from kvtax.stats import Estimate

KNOWN_COSTS = Path(__file__).parent / "known_costs.toml"
# Share of a request's time at the median below which users do not feel the connector.
FELT_SHARE = 0.02


class KnownCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[cost]]` of known_costs.toml, which describes the fields."""

    connectors: list[str]
    methods: list[str]
    at_least_us: float
    words: str
    patch: str
    releases: str = ""
    moves_with: str | None = None

    def shows(self, summary: InstanceSummary) -> Iterator[tuple[str, float]]:
        """Yield the methods that have the cost, with its us."""
        for column in summary.instance.methods:
            name = column.removesuffix("_us")
            if self._is_at(name) and (us := self._us(summary, column)) is not None:
                yield name, us

    def _is_at(self, name: str) -> bool:
        side, *inside, method = name.split(".")
        if f"{side}.{method}" not in self.methods:
            return False
        # A connector inside of another: worker.MooncakeConnector[0].get_finished.
        return not (inside and self.connectors) or inside[-1].startswith(
            tuple(self.connectors)
        )

    def _us(self, summary: InstanceSummary, column: str) -> float | None:
        """Return the us if they reach `at_least_us`."""
        if self.moves_with is None:
            methods = summary.cost.methods if summary.cost else []
            means_us = {part.column: part.mean_us for part in methods}
            us = means_us.get(column, 0.0)
            return us if us >= self.at_least_us else None
        slope = summary.slopes.get(column, {}).get(self.moves_with)
        if isinstance(slope, Estimate) and slope.low >= self.at_least_us:
            return slope.value
        return None


@functools.cache
def known_costs() -> list[KnownCost]:
    """Read known_costs.toml."""
    decoded = msgspec.toml.decode(
        KNOWN_COSTS.read_bytes(), type=dict[str, list[KnownCost]]
    )
    return decoded["cost"]


def answer(summary: InstanceSummary) -> list[str]:
    """Say what the connector costs, what that moves with, who feels it, what to do."""
    if summary.cost is None:
        return []
    return [_sentence(summary, summary.cost), *(f"- {r}" for r in remedies(summary))]


def remedies(summary: InstanceSummary) -> list[str]:
    """Name each known cost that shows, and what ends it: one per method."""
    shown: dict[str, str] = {}
    for cost in known_costs():
        if _may_be(cost, summary):
            for name, us in cost.shows(summary):
                shown.setdefault(name, _remedy(cost, name, us, summary))
    return [*shown.values()]


def _may_be(cost: KnownCost, summary: InstanceSummary) -> bool:
    """Return whether the instance has, or may have, a connector with the cost."""
    connectors = set(summary.instance.header.connectors)
    if connectors and cost.connectors and connectors.isdisjoint(cost.connectors):
        return False
    # A patch is for all releases that have the cost, and none before.
    version = summary.instance.vllm_version
    return not (version and cost.releases) or _numbers(version) >= _numbers(
        cost.releases.split()[0]
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _remedy(cost: KnownCost, name: str, us: float, summary: InstanceSummary) -> str:
    per = f" per {COVARIATES[cost.moves_with].unit}" if cost.moves_with else ""
    words = f"`{name}` ({us:,.0f} µs{per}) {cost.words}"
    if not cost.patch:
        return f"{words}."
    if cost.connectors and not summary.instance.header.connectors:
        words += f", if it is {cost.connectors[0]}'s"
    command = f"kvtax run --fix {cost.patch} -- vllm serve ..."
    return f"{words}. Remedy: `{command}` (vLLM {cost.releases})"


def _sentence(summary: InstanceSummary, cost: Cost) -> str:
    step_us = f"a step of {cost.step.mean_us:,.0f} µs"
    overlap = f" ({cost.overlap})" if cost.overlap else ""
    name = _name(summary)
    if cost.connector is None:
        return f"What {name} adds to {step_us}{overlap} is unknown."
    words = (
        f"{name[0].upper()}{name[1:]} adds {cost.connector.mean_us:,.1f} µs to "
        f"{step_us}{overlap}: "
        f"{cost.connector.share:.1%} of the time"
    )
    if cost.methods[0].mean_us > 0:
        most = cost.methods[0]
        words += f", most of it {most.name} ({most.mean_us:,.1f} µs)"
    moved = [
        f"{slope:+,.1f} µs per {COVARIATES[axis].unit}"
        for axis, slope in summary.slopes.get("connector_us", {}).items()
        if isinstance(slope, Estimate) and slope.low > 0
    ]
    words += f". It moved with: {'; '.join(moved)}" if moved else ""
    return words + _felt(summary) + "."


def _name(summary: InstanceSummary) -> str:
    connectors = summary.instance.header.connectors
    return connectors[0] if connectors else "the connector"


def _felt(summary: InstanceSummary) -> str:
    if not (share := summary.felt.get("e2e")):
        return ""
    felt = "Users feel it" if share["p50"] >= FELT_SHARE else "Users hardly feel it"
    return (
        f". {felt}: {share['p50']:.2%} of a request's time at the median, "
        f"{share['p99']:.2%} at p99"
    )
