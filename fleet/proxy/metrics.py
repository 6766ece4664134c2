# SPDX-License-Identifier: Apache-2.0
"""The proxy's own metrics: /metrics for Prometheus, /breakdown as JSON.

They are read from the live state when somebody asks; no request pays for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lab.records.instances import Instance

from .exact import Exact
from .handler import Handler
from .health import Health
from .kv_events import Subscriber
from .loads import FleetLoad
from .mirror import Mirror
from .router import Router


class Metrics:
    """Reads the proxy's parts; `exact` is None without `--cache exact`."""

    def __init__(
        self,
        instances: Sequence[Instance],
        loads: FleetLoad,
        health: Health,
        mirror: Mirror,
        exact: Exact | None,
        subscribers: dict[str, Subscriber],
        router: Router,
        handler: Handler,
    ) -> None:
        self._instances = instances
        self._loads = loads
        self._health = health
        self._mirror = mirror
        self._exact = exact
        self._subscribers = subscribers
        self._router = router
        self._handler = handler
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def breakdown(self) -> dict[str, Any]:
        """Per instance: in flight, ended, cached by each account; decision times."""
        return {
            "instances": {
                one.name: self._of(place, one.name)
                for place, one in enumerate(self._instances)
            },
            "offloads": self._loads.offloads,
            "decision_us": self._decision_us(),
        }

    def prometheus(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _of(self, place: int, name: str) -> dict[str, Any]:
        load = self._loads[name]
        ended = self._handler.ended
        return {
            "healthy": name not in self._health.ejected,
            "requests": load.requests,
            "ongoing_tokens": load.ongoing_tokens,
            "pending_prefill_tokens": load.pending_prefill_tokens,
            "ended": {status: n for (who, status), n in ended.items() if who == name},
            "cache": self._cache(place, name),
        }

    def _cache(self, place: int, name: str) -> dict[str, Any]:
        """Tokens cached at an instance, by the mirror and by its KV events.

        `exact_tokens` is None where there are no KV events. `mean_difference_tokens`:
        by how much the two disagreed about a prompt that went there, on average.
        """
        mirror = round(self._mirror.tokens[place])
        if self._exact is None:
            return {"mirror_tokens": mirror, "exact_tokens": None}
        subscriber = self._subscribers[name]
        exact = self._exact.tokens[place]
        compared = self._router.differences[place]
        total = self._router.difference_tokens[place]
        return {
            "mirror_tokens": mirror,
            "exact_tokens": exact,
            "mirror_minus_exact_tokens": mirror - exact,
            "mean_difference_tokens": total / compared if compared else None,
            "compared_prompts": compared,
            "complete": subscriber.complete,
            "gaps": subscriber.gaps,
            "skipped_blocks": self._exact.skipped[place],
        }

    def _decision_us(self) -> dict[str, float] | None:
        """Of the last 10,000 decisions: look-up, snapshot and policy together."""
        times = self._router.decision_us
        if not times:
            return None
        p50, p99 = np.percentile(times, [50, 99]).round(1).tolist()
        return {"n": len(times), "p50": p50, "p99": p99}

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """For prometheus_client."""
        ended = CounterMetricFamily(
            "kvtax_proxy_requests", "Requests ended", labels=["instance", "status"]
        )
        for (name, status), number in self._handler.ended.items():
            ended.add_metric([name or "", status], number)
        yield ended
        fallbacks = CounterMetricFamily(
            "kvtax_proxy_fallbacks",
            "Offloads given up, by prefill",
            labels=["instance"],
        )
        for name, number in self._handler.fallbacks.items():
            fallbacks.add_metric([name], number)
        yield fallbacks
        yield CounterMetricFamily(
            "kvtax_proxy_ejections", "Ejections", value=self._health.ejections
        )
        yield GaugeMetricFamily(
            "kvtax_proxy_offloads", "Prefills elsewhere", value=self._loads.offloads
        )
        yield from self._gauges()

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        views = [self._of(p, one.name) for p, one in enumerate(self._instances)]
        for field in (
            "healthy",
            "requests",
            "ongoing_tokens",
            "pending_prefill_tokens",
        ):
            yield self._gauge(field, [view[field] for view in views])
        caches = [view["cache"] for view in views]
        for field in (
            "mirror_tokens",
            "exact_tokens",
            "mirror_minus_exact_tokens",
            "mean_difference_tokens",
            "complete",
            "gaps",
            "skipped_blocks",
        ):
            yield self._gauge(f"cache_{field}", [c.get(field) for c in caches])
        for name, value in (self._decision_us() or {}).items():
            yield GaugeMetricFamily(
                f"kvtax_proxy_decision_us_{name}", "Decision time", value=value
            )

    def _gauge(self, field: str, values: list[float | None]) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(
            f"kvtax_proxy_{field}", field.replace("_", " "), labels=["instance"]
        )
        for one, value in zip(self._instances, values, strict=True):
            if value is not None:
                gauge.add_metric([one.name], float(value))
        return gauge
