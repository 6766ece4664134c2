# SPDX-License-Identifier: Apache-2.0
"""The proxy's own metrics: /metrics for Prometheus, /breakdown as JSON.

They are computed from the live state when requested; no request pays for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvtax_fleet.records.decisions import (
    Breakdown,
    CachedTokens,
    DecisionTimes,
    InstanceBreakdown,
)

from .core import Core
from .kvindexd import Kvindexd, State
from .tokenizer import Tokens

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


Number = TypeVar("Number", int, float)


class Counts(msgspec.Struct):
    """Counts of one worker, or of several together; loads are shared, so not in here.

    `ended`: (instance, status, requests). `mirror_tokens`, `differences` and
    `difference_tokens`: by instance, in their order.
    """

    ejected: set[str]
    ended: list[tuple[str | None, str, int]]
    untokenized: dict[str, int]
    ejections: int
    failed_open: int
    unanswered: int
    mirror_tokens: list[float]
    differences: list[int]
    difference_tokens: list[int]
    decision_us: list[float]

    @classmethod
    def of(cls, core: Core[Any], tokens: Tokens, exact: Kvindexd | None) -> Counts:
        router = core.router
        return cls(
            core.health.ejected,
            [(*key, number) for key, number in core.ended.items()],
            tokens.unknown,
            core.health.ejections,
            core.failed_open,
            0 if exact is None else exact.unanswered,
            core.mirror.tokens,
            router.differences,
            router.difference_tokens,
            list(router.decision_us),
        )


def together(workers: Sequence[Counts]) -> Counts:
    """Sum the counts of workers. An instance is ejected if one has ejected it."""
    ended: Counter[tuple[str | None, str]] = Counter()
    untokenized: Counter[str] = Counter()
    for worker in workers:
        ended.update({(name, status): n for name, status, n in worker.ended})
        untokenized.update(worker.untokenized)
    return Counts(
        set[str]().union(*(worker.ejected for worker in workers)),
        [(*key, number) for key, number in ended.items()],
        untokenized,
        sum(worker.ejections for worker in workers),
        sum(worker.failed_open for worker in workers),
        sum(worker.unanswered for worker in workers),
        _sums([worker.mirror_tokens for worker in workers]),
        _sums([worker.differences for worker in workers]),
        _sums([worker.difference_tokens for worker in workers]),
        [us for worker in workers for us in worker.decision_us],
    )


def _sums(rows: list[list[Number]]) -> list[Number]:
    return [sum(column) for column in zip(*rows, strict=True)]


class Metrics:
    """Metrics of the proxy's parts, kvindexd's `states` and `others`, other workers."""

    def __init__(
        self, core: Core[Any], tokens: Tokens, exact: Kvindexd | None = None
    ) -> None:
        self._core = core
        self._exact = exact
        self._tokens = tokens
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def counts(self) -> Counts:
        """Return the counts of this worker."""
        return Counts.of(self._core, self._tokens, self._exact)

    def breakdown(
        self, states: dict[str, State], others: Sequence[Counts] = ()
    ) -> Breakdown:
        self._refresh(states, others)
        return Breakdown(
            instances={
                name: self._of(place, name)
                for place, name in enumerate(self._core.instances)
            },
            offloads=self._loads.offloads,
            decision_us=self._decision_us(),
        )

    def prometheus(
        self, states: dict[str, State], others: Sequence[Counts] = ()
    ) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._refresh(states, others)
        return generate_latest(self._registry)

    def _refresh(self, states: dict[str, State], others: Sequence[Counts]) -> None:
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
            ended={
                status: n for other, status, n in self._counts.ended if other == name
            },
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
        """Yield the metrics for prometheus_client."""
        ended = CounterMetricFamily(
            "kvtax_proxy_requests", "Requests ended", labels=["instance", "status"]
        )
        for name, status, number in self._counts.ended:
            ended.add_metric([name or "", status], number)
        yield ended
        yield from self._core.offloader.account.collect()
        unknown = CounterMetricFamily(
            "kvtax_proxy_untokenized",
            "Prompts in words whose token ids could not be computed",
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
            "Decisions that took ejected instances for healthy: no other was left",
            value=self._counts.failed_open,
        )
        if self._exact is not None:
            yield CounterMetricFamily(
                "kvtax_proxy_unanswered",
                "Prompts of token ids that kvindexd did not look up",
                value=self._counts.unanswered,
            )
        yield GaugeMetricFamily(
            "kvtax_proxy_offloads", "Prefills elsewhere", value=self._loads.offloads
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
