# SPDX-License-Identifier: Apache-2.0
"""The worker side: lets peers read its KV cache, and reads peers' blocks into it."""

from collections import Counter
from typing import TYPE_CHECKING

import torch
from mooncake.engine import TransferEngine
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip

from connectors.direct_read.memory import device_fence, layout_of, regions_of
from connectors.direct_read.metadata import DirectReadHandshake, DirectReadMetadata
from connectors.direct_read.metrics import DirectReadStats
from connectors.direct_read.protocol import WorkerAddress
from connectors.direct_read.puller import Puller
from connectors.direct_read.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class DirectReadWorker:
    """Raises RuntimeError if Mooncake cannot do what the config asks for."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"):
        self._settings = Settings.of(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = get_tensor_model_parallel_rank()
        self._engine = TransferEngine()
        host, protocol = get_ip(), self._settings.protocol
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise RuntimeError(
                f"DirectReadConnector: Mooncake cannot use {protocol!r} here, set "
                "mooncake_protocol in kv_connector_extra_config to rdma or tcp"
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._handshake: DirectReadHandshake | None = None
        self._puller: Puller | None = None
        self._device = torch.device("cpu")
        self._failed_block_ids: set[int] = set()
        self._counts: Counter[str] = Counter()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        regions = regions_of(kv_caches, self._num_blocks)
        for address, block_bytes in regions:
            num_bytes = block_bytes * self._num_blocks
            if self._engine.register_memory(address, num_bytes) != 0:
                raise RuntimeError(
                    "DirectReadConnector: Mooncake cannot register the KV cache"
                )
        address = WorkerAddress(
            session=self._session,
            base_addresses=[address for address, _ in regions],
            block_bytes=[block_bytes for _, block_bytes in regions],
        )
        self._device = next(iter(kv_caches.values())).device
        layout = layout_of(kv_caches, self._vllm_config)
        self._handshake = DirectReadHandshake(address, layout)
        self._puller = Puller(self._engine, address, self._rank, self._settings.secret)

    def handshake(self) -> DirectReadHandshake | None:
        return self._handshake

    def start_load_kv(self, metadata: DirectReadMetadata) -> None:
        if metadata.pulls:
            assert self._puller is not None
            fence = device_fence(self._device)
            for pull in metadata.pulls:
                self._puller.begin(pull, fence)
        if metadata.counts and self._rank == 0:
            self._counts.update(metadata.counts)

    def get_finished(self, finished_req_ids: set[str]) -> set[str] | None:
        """Requests whose pulls have ended; nothing writes to their blocks any more."""
        puller = self._puller
        if puller is None or not puller.is_busy():
            return None
        if finished_req_ids:
            puller.cancel(finished_req_ids)
        pulled = puller.take_pulled()
        for one in pulled:
            self._failed_block_ids.update(one.failed_block_ids)
            self._counts.update(one.counts)
        return {one.request_id for one in pulled} or None

    def take_failed_block_ids(self) -> set[int]:
        """Failed blocks of requests that get_finished returned since the last call."""
        if not self._failed_block_ids:
            return set()
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_stats(self) -> DirectReadStats | None:
        if not self._counts:
            return None
        counts, self._counts = self._counts, Counter()
        return DirectReadStats(data=dict(+counts))

    def shutdown(self) -> None:
        """Returns once nothing is in flight."""
        if self._puller is not None:
            self._puller.close()
