# SPDX-License-Identifier: Apache-2.0
"""The proxy's own metrics: /metrics for Prometheus, /breakdown as JSON.

They are read from the live state when somebody asks; no request pays for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lab.records.breakdown import (
    Breakdown,
    CachedTokens,
    DecisionTimes,
    InstanceBreakdown,
)

from .core import Core
from .counts import Counts, together
from .kvindexd import Kvindexd, State
from .tokens import Tokens

INSTANCE_GAUGES = ("healthy", "requests", "ongoing_tokens", "pending_prefill_tokens")
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
    """Reads the proxy's parts, and is given the `states` that `exact` has, if any, and
    what `others` have counted, the other workers.
    """

    def __init__(
        self, core: Core, tokens: Tokens, exact: Kvindexd | None = None
    ) -> None:
        self._core = core
        self._exact = exact
        self._tokens = tokens
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def counts(self) -> Counts:
        """What this worker has counted."""
        return Counts.of(self._core, self._tokens, self._exact)

    def breakdown(
        self, states: dict[str, State], others: Sequence[Counts] = ()
    ) -> Breakdown:
        self._look(states, others)
        return Breakdown(
            instances={
                one.name: self._of(place, one.name)
                for place, one in enumerate(self._core.instances)
            },
            offloads=self._loads.offloads,
            decision_us=self._decision_us(),
        )

    def prometheus(
        self, states: dict[str, State], others: Sequence[Counts] = ()
    ) -> bytes:
        """In Prometheus' text format."""
        self._look(states, others)
        return generate_latest(self._registry)

    def _look(self, states: dict[str, State], others: Sequence[Counts]) -> None:
        self._states = states
        self._counts = together([self.counts(), *others])
        self._loads = self._core.loads.totals()

    def _of(self, place: int, name: str) -> InstanceBreakdown:
        load = self._loads.instances[place]
        return InstanceBreakdown(
            healthy=name not in self._counts.ejected,
            requests=load.requests,
            ongoing_tokens=load.ongoing_tokens,
            pending_prefill_tokens=load.pending_prefill_tokens,
            ended={status: n for one, status, n in self._counts.ended if one == name},
            cache=self._cached(place, name),
        )

    def _cached(self, place: int, name: str) -> CachedTokens:
        mirror = round(self._counts.mirror_tokens[place])
        state = self._states.get(name)
        if state is None:
            return CachedTokens(mirror)
        compared = self._counts.differences[place]
        total = self._counts.difference_tokens[place]
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
        times = self._counts.decision_us
        if not times:
            return None
        p50, p99 = np.percentile(times, [50, 99]).round(1).tolist()
        return DecisionTimes(len(times), p50, p99)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        ended = CounterMetricFamily(
            "kvtax_proxy_requests", "Requests ended", labels=["instance", "status"]
        )
        for name, status, number in self._counts.ended:
            ended.add_metric([name or "", status], number)
        yield ended
        yield from self._core.offloader.account.collect()
        unknown = CounterMetricFamily(
            "kvtax_proxy_untokenized",
            "Prompts in words whose token ids were not told",
            labels=["reason"],
        )
        for reason, number in self._counts.untokenized.items():
            unknown.add_metric([reason], number)
        yield unknown
        yield CounterMetricFamily(
            "kvtax_proxy_ejections", "Ejections", value=self._counts.ejections
        )
        yield CounterMetricFamily(
            "kvtax_proxy_failed_open",
            "Decisions that took ejected instances for healthy: nobody was left",
            value=self._counts.failed_open,
        )
        if self._exact is not None:
            yield CounterMetricFamily(
                "kvtax_proxy_unanswered",
                "Prompts of token ids that kvindexd did not answer",
                value=self._counts.unanswered,
            )
        yield GaugeMetricFamily(
            "kvtax_proxy_offloads", "Prefills elsewhere", value=self._loads.offloads
        )
        yield from self._gauges()

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        instances = self._core.instances
        views = [self._of(p, one.name) for p, one in enumerate(instances)]
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
        for one, value in zip(self._core.instances, values, strict=True):
            if value is not None:
                gauge.add_metric([one.name], float(value))
        return gauge
