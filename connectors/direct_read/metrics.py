# SPDX-License-Identifier: Apache-2.0
"""Counts of direct reads, in the log and as vllm:direct_read_* counters."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        PromMetric,
        PromMetricT,
    )

    from connectors.direct_read import ledger
    from connectors.direct_read.lookups import Found

# First the counts of the instance that reads, then of the instance that is read.
COUNTERS = {
    "lookups": "requests for which a peer was asked",
    "lookup_failures": "requests whose peer did not answer or does not match",
    "blocks_offered": "blocks that peers had and offered",
    "pulls": "reads of a request's blocks that have ended",
    "pulls_cut_short": "pulls of which some blocks do not count",
    "blocks_pulled": "blocks read from peers that were still valid afterwards",
    "blocks_rejected": "blocks read from peers that may have evicted them meanwhile",
    "blocks_unread": "offered blocks whose read failed or was not begun",
    "bytes_pulled": "bytes of the blocks pulled",
    "served_lookups": "lookups by peers",
    "served_in_flight": "lookups by peers that stopped at a block still being computed",
}


@dataclass
class DirectReadStats(KVConnectorStats):
    """Counts since the last report; names as in COUNTERS, absent ones are 0."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class DirectReadPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self.make_per_engine(
                self._counter_cls(
                    name=f"vllm:direct_read_{name}",
                    documentation=f"Direct read: {documentation}.",
                    labelnames=labelnames,
                )
            )
            for name, documentation in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class SchedulerCounts:
    """Counts of the scheduler side until the next `take`.

    vLLM asks a scheduler connector for stats only in steps in which a worker
    connector has some, so the counts go to the worker and come back with its own.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._served: ledger.Counters | None = None
        self._served_lookups = 0
        self._served_in_flight = 0

    def serves(self, served: "ledger.Counters") -> None:
        """From now on, also count what this instance's ledger is asked."""
        self._served = served

    def answered(self, answer: "Found") -> None:
        self._counts["lookups"] += 1
        self._counts["lookup_failures"] += answer.failed
        self._counts["blocks_offered"] += len(answer.offer.block_ids)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call; called each step."""
        served = self._served
        if served is not None and served.lookups != self._served_lookups:
            lookups, in_flight = served.lookups, served.stopped_in_flight
            self._counts["served_lookups"] += lookups - self._served_lookups
            self._counts["served_in_flight"] += in_flight - self._served_in_flight
            self._served_lookups, self._served_in_flight = lookups, in_flight
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return dict(+counts)
