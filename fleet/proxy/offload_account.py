# SPDX-License-Identifier: Apache-2.0
"""How the offloads went: counts by outcome and times by phase, for /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Histogram, Metric

from lab.records.decisions import Offload

# From a prefill that was nearly cached to the longest that is waited for.
BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)


class OffloadAccount:
    """Every offload that was begun, once it has ended."""

    def __init__(self) -> None:
        self._ended = Counter(
            "kvtax_proxy_offloads_ended",
            "Prefills begun elsewhere: `used`, or why their KV was not",
            ["prefill", "outcome"],
            registry=None,
        )
        self._seconds = Histogram(
            "kvtax_proxy_offload_seconds",
            "Phases of the offloads whose KV was used",
            ["phase"],
            buckets=BUCKETS_S,
            registry=None,
        )

    def add(self, offload: Offload) -> None:
        outcome = offload.failure or "used"
        self._ended.labels(offload.prefill_instance, outcome).inc()
        if offload.failure is None:
            for phase, seconds in offload.phases_s().items():
                self._seconds.labels(phase).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        yield from self._ended.collect()
        yield from self._seconds.collect()
