# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Keeps the worker's map of cached block hashes equal to the scheduler's block pool.

``kv_connector_extra_config["hash_sync"]["source"]`` says how changes are found:

- ``"walk"`` compares the whole pool with what the worker knows, every step, whether or
  not anybody reads the map. Its cost is linear in the number of cached block hashes;
  this patch is there to measure it.
- ``"deltas"`` ships what the pool tells its listeners, so a step without a change ships
  nothing. It needs the patch block_pool_delta_listener.

The option has no default: a misspelt one must not pass for a cheap connector.
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


HOW_TO_ASK = (
    "the patch mooncake_hash_sync needs kv_connector_extra_config to hold "
    '"hash_sync": {"source": "walk"} or {"source": "deltas"}'
)
NOT_BOUND = (
    "the patch mooncake_hash_sync was not given the block pool: MooncakeConnector must "
    "be the engine's own connector, not one inside MultiConnector"
)


class BlockHashDelta(Protocol):
    def apply_to(self, block_ids: dict[BlockHashWithGroupId, int]) -> None: ...


class BlockHashSource(Protocol):
    def take(self) -> BlockHashDelta | None:
        """Return the changes since the last call; None if there are none."""


def block_hash_source(
    config: KVTransferConfig, block_pool: "BlockPool"
) -> BlockHashSource:
    """Make the source that the config names. Raises ValueError if it names none."""
    extra = config.kv_connector_extra_config
    if "serve_direct_reads" in extra:
        raise ValueError(f"serve_direct_reads is no option any more; {HOW_TO_ASK}")
    options = extra.get("hash_sync")
    if options == {"source": "walk"}:
        return BlockHashWalk(block_pool)
    if options != {"source": "deltas"}:
        raise ValueError(f"{HOW_TO_ASK}, not {options!r}")
    if BlockHashTracker is None:
        raise ValueError(
            'hash_sync source "deltas" needs the patch block_pool_delta_listener, '
            "which this vLLM does not have"
        )
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
