# SPDX-License-Identifier: Apache-2.0
"""A KV connector that reads prefix blocks out of a peer's memory: see README.md.

Load it with `kv_connector: DirectReadConnector` and
`kv_connector_module_path: connectors.direct_read.connector`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.direct_read.metadata import DirectReadMetadata
from connectors.direct_read.metrics import DirectReadPromMetrics, DirectReadStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from connectors.direct_read.scheduler import DirectReadScheduler
    from connectors.direct_read.worker import DirectReadWorker


class DirectReadConnector(KVConnectorBase_V1):
    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler: DirectReadScheduler | None = None
        self._worker: DirectReadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = _new_scheduler(vllm_config, kv_cache_config)
        else:
            self._worker = _new_worker(vllm_config, kv_cache_config)

    def shutdown(self) -> None:
        for side in (self.connector_scheduler, self._worker):
            if side is not None:
                side.shutdown()

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def on_workers_called(self, method: str | Callable[..., Any]) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.on_workers_called(method)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.set_workers(metadata)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.get_num_new_matched_tokens(
            request, num_computed_tokens
        )

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.update_state_after_alloc(
            request, blocks, num_external_tokens
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.connector_scheduler is not None
        self.connector_scheduler.request_finished(request)
        return False, None

    # A step begins at the end of its schedule() and ends with its update_from_output().

    def build_connector_meta(
        self, scheduler_output: "SchedulerOutput"
    ) -> KVConnectorMetadata:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.begin_step(
            scheduler_output.num_scheduled_tokens
        )

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """End the step. There are no events.

        vLLM has no hook for the end of a step. This is the only method of a connector
        that 0.18.1 calls in every update_from_output: update_connector_output is left
        out where the worker has nothing to report.
        """
        assert self.connector_scheduler is not None
        self.connector_scheduler.finish_step()
        return ()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return self._worker.handshake()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        assert self._worker is not None
        assert isinstance(self._connector_metadata, DirectReadMetadata)
        self._worker.start_load_kv(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed_block_ids()

    # Statistics.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # The scheduler's counts come by way of the worker.
        return self._worker.take_stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return DirectReadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return DirectReadPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


# Each side imports only what it needs itself; a process that shows stats, neither.


def _new_scheduler(*configs: Any) -> "DirectReadScheduler":
    try:
        from connectors.direct_read.scheduler import DirectReadScheduler
    except ModuleNotFoundError as error:
        if error.name != "vllm.v1.core.block_pool_listener":
            raise
        raise RuntimeError(
            "DirectReadConnector: this vLLM has no block_pool_listener, apply the "
            "patches block_pool_delta_listener and direct_read_hooks"
        ) from None
    return DirectReadScheduler(*configs)


def _new_worker(*configs: Any) -> "DirectReadWorker":
    from connectors.direct_read.worker import DirectReadWorker

    return DirectReadWorker(*configs)


# A MultiConnector finds the class of its connectors' stats by their names alone.
KVConnectorFactory.register_connector(
    DirectReadConnector.__name__, __name__, DirectReadConnector.__name__
)
