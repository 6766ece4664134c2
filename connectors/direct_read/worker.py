# SPDX-License-Identifier: Apache-2.0
"""The worker side: lets peers read its KV cache, and reads peers' blocks into it."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from mooncake.engine import TransferEngine
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.attention.backends.utils import get_kv_cache_layout

from connectors.direct_read.metadata import DirectReadHandshake, DirectReadMetadata
from connectors.direct_read.metrics import DirectReadStats
from connectors.direct_read.protocol import WorkerAddress
from connectors.direct_read.reads import Puller
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
        here = WorkerAddress(
            session=self._session,
            base_addresses=[address for address, _ in regions],
            block_bytes=[block_bytes for _, block_bytes in regions],
        )
        self._device = next(iter(kv_caches.values())).device
        layout = layout_of(kv_caches, self._vllm_config)
        self._handshake = DirectReadHandshake(here, layout)
        self._puller = Puller(self._engine, here, self._rank, self._settings.secret)

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
        """Return requests whose pulls have ended: nothing writes to their blocks."""
        puller = self._puller
        if puller is None or not puller.is_busy():
            return None
        if finished_req_ids:
            puller.cancel(finished_req_ids)
        pulled = puller.take_pulled()
        for pull in pulled:
            self._failed_block_ids.update(pull.failed_block_ids)
            self._counts.update(pull.counts)
        return {pull.request_id for pull in pulled} or None

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
        """Close; return once nothing is in flight."""
        if self._puller is not None:
            self._puller.close()


if TYPE_CHECKING:
    from vllm.config import VllmConfig


def regions_of(
    kv_caches: dict[str, torch.Tensor], num_blocks: int
) -> list[tuple[int, int]]:
    """Address of block 0 and bytes per block, for each tensor that has part of all.

    Block i of a region is at the address plus i times the bytes per block. Some
    layouts have keys and values in two halves; each half is a region. Raises
    ValueError if blocks do not lie one after the other.
    """
    regions: dict[int, int] = {}
    for name, cache in kv_caches.items():
        # The kernels' blocks can be a part of the manager's.
        if cache.shape[0] % num_blocks == 0:
            parts = [cache]
        elif cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0:
            parts = list(cache)
        else:
            raise ValueError(f"{name}: {tuple(cache.shape)} has no {num_blocks} blocks")
        for part in parts:
            num_bytes = part.numel() * part.element_size()
            if part.stride(0) * part.shape[0] * part.element_size() != num_bytes:
                raise ValueError(f"{name}: blocks with strides {part.stride()}")
            # Layers can share a cache.
            regions[part.data_ptr()] = num_bytes // num_blocks
    return list(regions.items())


def layout_of(
    kv_caches: dict[str, torch.Tensor], vllm_config: "VllmConfig"
) -> dict[str, str]:
    """Return the properties of a block's bytes that must be equal on both sides."""
    backend = get_current_attn_backend(vllm_config)
    cache = next(iter(kv_caches.values()))
    # Without the number of blocks, which may differ.
    block_dim = 1 if cache.shape[0] == 2 else 0
    layout = {
        "platform": current_platform.device_name,
        "attention_backend": backend.get_name(),
        "layout": get_kv_cache_layout(),
        "layers": str(len(kv_caches)),
        "shape": str(tuple(cache.shape[block_dim + 1 :])),
        "strides": str(cache.stride()[block_dim + 1 :]),
    }
    if current_platform.is_cpu():
        # The CPU's kernels order the bytes as suits its instructions.
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        layout["isa"] = _get_attn_isa(cache.dtype, cache.shape[-2], cache.shape[-1])
    return layout


def device_fence(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for all work queued on the device by now.

    With async scheduling a step in flight may still write to the blocks of a request
    that has ended, and vLLM gives these blocks to the next request. What a forward pass
    writes there comes later by itself; what the network writes does not.
    """
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize
