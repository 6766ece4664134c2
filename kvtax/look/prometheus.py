# SPDX-License-Identifier: Apache-2.0
"""New records for Prometheus; grafana.json is a dashboard for them.

Names and units are as in vLLM's own metrics: seconds, `_total` for what only grows. An
engine keeps its series when it starts anew; its gauges end with the process that writes
them.
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

NAME = "instance_name"
# By name: what it counts, and its label beside the engine's name.
COUNTERS = {
    "step_part_seconds": ("Time in the parts of engine steps.", "part"),
    "busy_seconds": (
        "Time in which engine steps ran; that of overlapping steps counts once.",
        "",
    ),
    "connector_method_seconds": (
        "Time in the connector's methods, without the methods that they called.",
        "method",
    ),
    "connector_method_calls": ("Calls of the connector's methods.", "method"),
    "bad_record_lines": ("Lines that are no records.", ""),
    "requests_ended": ("Requests that ended.", "finished_reason"),
}
GAUGES = {
    "cached_blocks": ("Cached block hashes, |cache|.", "cache_blocks"),
    "num_requests_running": ("Requests in the last step.", "running"),
    "num_requests_waiting": ("Requests that wait.", "waiting"),
}


class Collector:
    """Reads what is new whenever it is scraped."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, a sample per engine."""
        totals = self._watched.read()
        yield _steps(totals)
        values = {name: _counts(of) for name, of in totals.items()}
        for metric, (help_text, label) in COUNTERS.items():
            labels = [NAME, label] if label else [NAME]
            family = CounterMetricFamily(f"kvtax:{metric}", help_text, labels=labels)
            for name, counts in values.items():
                for kind, value in counts[metric].items():
                    family.add_metric([name, kind] if label else [name], value)
            yield family
        for metric, (help_text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvtax:{metric}", help_text, labels=[NAME])
            for name, of in totals.items():
                number: float | None = getattr(of.present, field, None)
                if number is not None:
                    gauge.add_metric([name], number)
            yield gauge


def _counts(totals: LiveTotals) -> dict[str, dict[str, float]]:
    """Return each counter's value by its label; "" where it has none."""
    parts = {"model": totals.model_us, "scheduler": totals.scheduler_us}
    # Without a method the connector's time is in the others, and unknown.
    if totals.by_method_us:
        parts["connector"] = totals.connector_us
    methods_s = {method: us / 1e6 for method, us in totals.by_method_us.items()}
    return {
        "step_part_seconds": {part: us / 1e6 for part, us in parts.items()},
        "busy_seconds": {"": totals.covered_us / 1e6},
        "connector_method_seconds": methods_s,
        "connector_method_calls": {name: totals.calls[name] for name in methods_s},
        "bad_record_lines": {"": totals.bad_lines},
        "requests_ended": dict(totals.ended),
    }


def _steps(totals: dict[str, LiveTotals]) -> Metric:
    steps = HistogramMetricFamily(
        "kvtax:step_seconds", "Time of engine steps.", labels=[NAME]
    )
    for name, of in totals.items():
        buckets = [
            (str(bound / 1e6), float(of.steps - of.slower_than[bound]))
            for bound in BUCKETS_US
        ]
        buckets.append(("+Inf", float(of.steps)))
        steps.add_metric([name], buckets, of.step_us / 1e6)
    return steps


def serve(watched: Watched, host: str, port: int) -> WSGIServer:
    """Serve from a thread; return what stops it. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(Collector(watched))
    server, _ = start_http_server(port, host, registry)
    return server


def serve_for_ever(watched: Watched, host: str, port: int) -> None:
    """Serve until Ctrl-C, and print the address once it is bound."""
    server = serve(watched, host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{server.server_port}/metrics"
    print(f"watching, {url}; Ctrl-C ends it", flush=True)
    try:
        while True:
            time.sleep(60)
    finally:
        server.shutdown()
