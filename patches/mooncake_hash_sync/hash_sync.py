# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
Keeps the worker's map of cached block hashes equal to the scheduler's block pool, less
the blocks that a step has yet to write.

``kv_connector_extra_config["hash_sync"]["source"]`` says how changes are found:

- ``"walk"`` compares the whole pool with what the worker knows, every step, whether or
  not anybody reads the map. Its cost is linear in the number of cached block hashes;
  this patch is there to measure it.
- ``"deltas"`` ships what the pool reports to its listeners, so a step without a change
  ships nothing. It needs the patch block_pool_delta_listener.

The option has no default: a misspelt one must not pass for a cheap connector.
"""

from typing import TYPE_CHECKING, Protocol

from vllm.config import KVTransferConfig
from vllm.v1.core.block_pool_listener import BlockHashChanges, BlockHashTracker
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

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


class BlockHashSource(Protocol):
    """Source of changes; a quiet step looks at `has_changes` only."""

    has_changes: bool

    def take(self) -> BlockHashChanges | None:
        """Return the changes since the last call; None if there are none."""


class StepFence:
    """Fence that withholds blocks from the worker's map until they are written.

    vLLM caches a block while it schedules the step that computes it. A step begins at
    the end of its schedule() and ends when its output has been processed; steps may
    overlap, and end in order. What async scheduling caches after a step counts as the
    next one's: it is offered late, never early. Evictions are not withheld.
    """

    def __init__(self, source: BlockHashSource):
        self.source = source
        # Per key, its block and the step that writes it, in the order of steps.
        self.unwritten: dict[BlockHashWithGroupId, tuple[int, int]] = {}
        self._begun = 0
        self._ended = 0

    def begin_step(self) -> BlockHashChanges | None:
        """Return what the worker must learn with this step; None if nothing."""
        self._begun += 1
        if not (self.source.has_changes or self.unwritten):
            return None
        changes = self.source.take()
        delta = BlockHashChanges(cleared=False, cached={}, evicted=[])
        if changes is not None:
            if changes.cleared:
                self.unwritten.clear()
            # A key that moves finds nothing until its new block is written.
            delta.cleared = changes.cleared
            delta.evicted = [*changes.evicted, *changes.cached]
            for key in delta.evicted:
                self.unwritten.pop(key, None)
            for key, block_id in changes.cached.items():
                self.unwritten[key] = block_id, self._begun
        for key, (block_id, step) in self.unwritten.items():
            if step > self._ended:
                break
            delta.cached[key] = block_id
        for key in delta.cached:
            del self.unwritten[key]
        return delta if changes is not None or delta.cached else None

    def end_step(self) -> None:
        self._ended += 1


def block_hash_fence(config: KVTransferConfig, block_pool: "BlockPool") -> StepFence:
    """Make the fence of the source that the config names.

    Raises ValueError if it names none.
    """
    extra = config.kv_connector_extra_config
    if "serve_direct_reads" in extra:
        raise ValueError(f"serve_direct_reads is no option any more; {HOW_TO_ASK}")
    options = extra.get("hash_sync")
    if options == {"source": "walk"}:
        return StepFence(BlockHashWalk(block_pool))
    if options != {"source": "deltas"}:
        raise ValueError(f"{HOW_TO_ASK}, not {options!r}")
    if not hasattr(block_pool, "add_listener"):
        raise ValueError(
            'hash_sync source "deltas" needs the patch block_pool_delta_listener, '
            "which this vLLM does not have"
        )
    return StepFence(BlockHashTracker(block_pool))


class BlockHashWalk:
    """Comparison of all cached block hashes with those of the last call."""

    has_changes = True

    def __init__(self, block_pool: "BlockPool"):
        self._block_pool = block_pool
        self._known: set[BlockHashWithGroupId] = set()

    def take(self) -> BlockHashChanges:
        # Looked up anew each time: reset_prefix_cache() replaces the map.
        block_map = self._block_pool.cached_block_hash_to_block
        current = set(block_map._cache)
        added = current - self._known
        evicted = self._known - current
        self._known = current
        blocks = {key: block_map.get_one_block(key) for key in added}
        return BlockHashChanges(
            cleared=False,
            cached={key: block.block_id for key, block in blocks.items() if block},
            evicted=list(evicted),
        )
