# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a KV cache are in memory, how their bytes are laid out, and when
they can be written to."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import get_kv_cache_layout

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
    """What must be equal for the bytes of a block to mean the same."""
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
    """A function that returns once the device has done all work queued by now.

    With async scheduling a step in flight may still write to the blocks of a request
    that has ended, and vLLM gives these blocks to the next request. What a forward pass
    writes there comes later by itself; what the network writes does not.
    """
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize
