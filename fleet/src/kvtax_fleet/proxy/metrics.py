# SPDX-License-Identifier: Apache-2.0
"""The proxy's own metrics: /metrics for Prometheus, /breakdown as JSON.

They are computed from the live state when requested; no request pays for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvtax_fleet.proxy.core import Core
from kvtax_fleet.proxy.kvindexd import Kvindexd, State
from kvtax_fleet.records.decisions import (
    Breakdown,
    CachedTokens,
    DecisionTimes,
    InstanceBreakdown,
)

INSTANCE_GAUGES = ("healthy", "requests", "ongoing_tokens", "pending_prefill_tokens")
COUNTS = {
    "ejections": "Ejections",
    "failed_open": "Decisions as if no instance were ejected: no other was left",
    "unanswered": "Prompts of token ids that kvindexd did not look up",
}
CACHE_GAUGES = (
    "mirror_tokens",
    "exact_tokens",
    "mirror_minus_exact_tokens",
    "mean_difference_tokens",
    "complete",
    "gaps",
    "skipped_blocks",
)


class Metrics:
    """Metrics of the proxy's parts, and of kvindexd's `states`."""

    def __init__(self, core: Core[Any], exact: Kvindexd | None = None) -> None:
        self._core = core
        self._exact = exact
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def breakdown(self, states: dict[str, State]) -> Breakdown:
        self._states = states
        return Breakdown(
            instances={
                name: self._of(place, name)
                for place, name in enumerate(self._core.instances)
            },
            offloads=self._core.loads.offloads,
            decision_us=self._decision_us(),
        )

    def prometheus(self, states: dict[str, State]) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._states = states
        return generate_latest(self._registry)

    def _of(self, place: int, name: str) -> InstanceBreakdown:
        core = self._core
        load = core.loads[name]
        return InstanceBreakdown(
            healthy=name not in core.health.ejected,
            requests=load.requests,
            ongoing_tokens=load.ongoing_tokens,
            pending_prefill_tokens=load.pending_prefill_tokens,
            ended={
                status: n for (other, status), n in core.ended.items() if other == name
            },
            cache=self._cached(place, name),
        )

    def _cached(self, place: int, name: str) -> CachedTokens:
        mirror = round(self._core.mirror.tokens[place])
        state = self._states.get(name)
        if state is None:
            return CachedTokens(mirror)
        compared = self._core.router.differences[place]
        total = self._core.router.difference_tokens[place]
        exact = state.tokens
        return CachedTokens(
            mirror_tokens=mirror,
            exact_tokens=exact,
            mirror_minus_exact_tokens=None if exact is None else mirror - exact,
            mean_difference_tokens=total / compared if compared else None,
            compared_prompts=compared,
            complete=state.complete,
            gaps=state.gaps,
            skipped_blocks=state.skipped_blocks,
        )

    def _decision_us(self) -> DecisionTimes | None:
        times = self._core.router.decision_us
        if not times:
            return None
        p50, p99 = np.percentile(times, [50, 99]).round(1).tolist()
        return DecisionTimes(len(times), p50, p99)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for prometheus_client."""
        ended = CounterMetricFamily(
            "kvtax_proxy_requests", "Requests ended", labels=["instance", "status"]
        )
        for (name, status), number in self._core.ended.items():
            ended.add_metric([name or "", status], number)
        yield ended
        counts = {"ejections": self._core.health.ejections}
        counts["failed_open"] = self._core.failed_open
        if self._exact is not None:
            counts["unanswered"] = self._exact.unanswered
        for name, number in counts.items():
            yield CounterMetricFamily(f"kvtax_proxy_{name}", COUNTS[name], value=number)
        yield GaugeMetricFamily(
            "kvtax_proxy_offloads",
            "Prefills elsewhere",
            value=self._core.loads.offloads,
        )
        yield from self._gauges()

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        views = [self._of(*item) for item in enumerate(self._core.instances)]
        for field in INSTANCE_GAUGES:
            yield self._gauge(field, [getattr(view, field) for view in views])
        for field in CACHE_GAUGES:
            values = [getattr(view.cache, field) for view in views]
            yield self._gauge(f"cache_{field}", values)
        if times := self._decision_us():
            for name, value in msgspec.structs.asdict(times).items():
                yield GaugeMetricFamily(
                    f"kvtax_proxy_decision_us_{name}", "Decision time", value=value
                )

    def _gauge(self, field: str, values: list[float | None]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(
            f"kvtax_proxy_{field}", field.replace("_", " "), labels=["instance"]
        )
        for name, value in zip(self._core.instances, values, strict=True):
            if value is not None:
                gauge.add_metric([name], float(value))
        return gauge
