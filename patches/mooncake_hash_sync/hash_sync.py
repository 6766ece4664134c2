# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Keeps the worker's map of cached block hashes equal to the scheduler's block pool,
by walking the whole pool every step. That walk is what this patch is there to
measure: its cost is linear in the number of cached block hashes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass
class BlockHashDelta:
    """What the prefix cache gained and lost since the last engine step."""

    added: dict[BlockHashWithGroupId, int]
    removed: set[BlockHashWithGroupId]

    def apply_to(self, block_ids: dict[BlockHashWithGroupId, int]) -> None:
        for block_hash in self.removed:
            del block_ids[block_hash]
        block_ids.update(self.added)


class BlockHashSync:
    """Scheduler side: remembers which block hashes the worker knows."""

    def __init__(self, block_pool: "BlockPool"):
        self._block_pool = block_pool
        self._known: set[BlockHashWithGroupId] = set()

    def take_delta(self) -> BlockHashDelta:
        # Looked up anew each time: reset_prefix_cache() replaces the map.
        block_map = self._block_pool.cached_block_hash_to_block
        current = set(block_map._cache)
        added = current - self._known
        removed = self._known - current
        self._known = current
        return BlockHashDelta(
            added={key: block_map.get_one_block(key).block_id for key in added},
            removed=removed,
        )
