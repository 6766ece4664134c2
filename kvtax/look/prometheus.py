# SPDX-License-Identifier: Apache-2.0
"""New records for Prometheus; grafana.json is a dashboard for them.

Names and units are as in vLLM's own metrics: seconds, `_total` for what only grows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvtax.look.live import BUCKETS_US, LiveTotals, Watched


class Collector:
    """Reads what is new whenever it is scraped."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """All metrics, a sample per instance."""
        totals = self._watched.read()
        yield _steps(totals)
        parts = CounterMetricFamily(
            "kvtax:step_part_seconds",
            "Time in the parts of engine steps.",
            labels=["instance_name", "part"],
        )
        busy = CounterMetricFamily(
            "kvtax:busy_seconds",
            "Time in which engine steps ran; that of overlapping steps counts once.",
            labels=["instance_name"],
        )
        methods = CounterMetricFamily(
            "kvtax:connector_method_seconds",
            "Time in the connector's methods, without the methods that they called.",
            labels=["instance_name", "method"],
        )
        calls = CounterMetricFamily(
            "kvtax:connector_method_calls",
            "Calls of the connector's methods.",
            labels=["instance_name", "method"],
        )
        bad = CounterMetricFamily(
            "kvtax:bad_record_lines",
            "Lines that are no records.",
            labels=["instance_name"],
        )
        ended = CounterMetricFamily(
            "kvtax:requests_ended",
            "Requests that ended.",
            labels=["instance_name", "finished_reason"],
        )
        gauges = {
            field: GaugeMetricFamily(
                f"kvtax:{name}", help_text, labels=["instance_name"]
            )
            for field, name, help_text in (
                ("cache_blocks", "cached_blocks", "Cached block hashes, |cache|."),
                ("running", "num_requests_running", "Requests in the last step."),
                ("waiting", "num_requests_waiting", "Requests that wait."),
            )
        }
        for name, one in totals.items():
            busy.add_metric([name], one.covered_us / 1e6)
            # Without a method the connector's time is in the others, and unknown.
            known = ["model", "scheduler", *["connector"] * bool(one.by_method_us)]
            for part in known:
                parts.add_metric([name, part], getattr(one, f"{part}_us") / 1e6)
            for method, us in one.by_method_us.items():
                methods.add_metric([name, method], us / 1e6)
                calls.add_metric([name, method], one.calls[method])
            bad.add_metric([name], one.bad_lines)
            for field, gauge in gauges.items():
                gauge.add_metric([name], getattr(one, field))
            for reason, count in one.ended.items():
                ended.add_metric([name, reason], count)
        yield from (busy, parts, methods, calls, bad, ended, *gauges.values())


def _steps(totals: dict[str, LiveTotals]) -> Metric:
    steps = HistogramMetricFamily(
        "kvtax:step_seconds", "Time of engine steps.", labels=["instance_name"]
    )
    for name, one in totals.items():
        buckets = [
            (str(bound / 1e6), float(one.steps - one.slower_than[bound]))
            for bound in BUCKETS_US
        ]
        buckets.append(("+Inf", float(one.steps)))
        steps.add_metric([name], buckets, one.step_us / 1e6)
    return steps


def serve(watched: Watched, address: str) -> WSGIServer:
    """Serve at HOST:PORT, from a thread; what stops it. Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r}: want HOST:PORT, such as 127.0.0.1:9109")
    registry = CollectorRegistry()
    registry.register(Collector(watched))
    server, _ = start_http_server(int(port), host, registry)
    return server


def serve_for_ever(watched: Watched, address: str) -> None:
    """Serve until Ctrl-C."""
    server = serve(watched, address)
    try:
        while True:
            time.sleep(60)
    finally:
        server.shutdown()
