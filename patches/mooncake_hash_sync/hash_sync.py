# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Keeps the worker's map of cached block hashes equal to the scheduler's block pool.

Without block_pool_delta_listener nobody tells what changed, and the whole pool is
walked every step, whether or not anybody reads the map. That walk is what this patch
is there to measure: its cost is linear in the number of cached block hashes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

try:
    from vllm.v1.core.block_pool_listener import BlockHashTracker
except ImportError:
    BlockHashTracker = None

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class BlockHashDelta(Protocol):
    def apply_to(self, block_ids: dict[BlockHashWithGroupId, int]) -> None: ...


class BlockHashSource(Protocol):
    def take(self) -> BlockHashDelta | None:
        """What changed since the last call."""


def block_hash_source(
    config: KVTransferConfig, block_pool: "BlockPool"
) -> BlockHashSource | None:
    """Where the deltas come from; None if nobody is going to read the map."""
    if BlockHashTracker is None:
        return BlockHashWalk(block_pool)
    if not config.kv_connector_extra_config.get("serve_direct_reads", False):
        return None
    return BlockHashTracker(block_pool)


@dataclass
class WalkedDelta:
    added: dict[BlockHashWithGroupId, int]
    removed: set[BlockHashWithGroupId]

    def apply_to(self, block_ids: dict[BlockHashWithGroupId, int]) -> None:
        for block_hash in self.removed:
            del block_ids[block_hash]
        block_ids.update(self.added)


class BlockHashWalk:
    """Compares all cached block hashes with those that the worker knows."""

    def __init__(self, block_pool: "BlockPool"):
        self._block_pool = block_pool
        self._known: set[BlockHashWithGroupId] = set()

    def take(self) -> WalkedDelta:
        # Looked up anew each time: reset_prefix_cache() replaces the map.
        block_map = self._block_pool.cached_block_hash_to_block
        current = set(block_map._cache)
        added = current - self._known
        removed = self._known - current
        self._known = current
        return WalkedDelta(
            added={key: block_map.get_one_block(key).block_id for key in added},
            removed=removed,
        )
