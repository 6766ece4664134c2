# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    Cache = dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]]

logger = init_logger(__name__)


class BlockPoolListener(ABC):
    """Observer of every change to the contents of a block pool's prefix cache.

    The calls come in order, in the scheduler's thread, from within the block
    pool, after the change: they must be quick and must not change the pool.
    Several blocks can hold the same key.

    A block is cached while the step that computes it is scheduled. Who reads it
    must wait until that step's output is there.
    """

    @abstractmethod
    def on_block_cached(self, key: BlockHashWithGroupId, block_id: int) -> None:
        """Note that the key finds the block from now on."""

    @abstractmethod
    def on_block_evicted(self, key: BlockHashWithGroupId, block_id: int) -> None:
        """Note that the key no longer finds the block."""

    @abstractmethod
    def on_cache_reset(self) -> None:
        """Note that no key finds a block any more."""

    def on_detached(self) -> None:
        """Withdraw everything: a call raised, and no other call follows.

        The cache still changes, so what the listener holds is soon false.
        """
        self.on_cache_reset()


class BlockPoolListeners(list[BlockPoolListener]):
    """Listeners of a block pool.

    Args:
        cache: What the map of cached blocks holds.
    """

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache

    def add(self, listener: BlockPoolListener) -> None:
        """Add a listener, which first receives what is cached already."""
        for key, blocks in self.cache.items():
            if isinstance(blocks, dict):
                for block_id in blocks:
                    listener.on_block_cached(key, block_id)
            else:
                listener.on_block_cached(key, blocks.block_id)
        self.append(listener)

    def discard(self, listener: BlockPoolListener) -> None:
        """Remove a listener, if it is there."""
        self[:] = [other for other in self if other is not listener]

    def notify(
        self,
        change: Literal["on_block_cached", "on_block_evicted", "on_cache_reset"],
        *arguments: object,
    ) -> None:
        """Call all listeners; the pool's change must end, whatever they raise."""
        # A copy, as a call may add and remove listeners.
        for listener in tuple(self):
            try:
                getattr(listener, change)(*arguments)
            except Exception:
                logger.exception("%r raised and is detached", listener)
                self.discard(listener)
                self._detach(listener)

    @staticmethod
    def _detach(listener: BlockPoolListener) -> None:
        try:
            listener.on_detached()
        except Exception:
            logger.exception("%r raised when it was detached", listener)


@dataclass
class BlockHashChanges:
    """Changes that bring a map from key to block id up to date.

    Args:
        cleared: Whether to forget all keys first.
        cached: One block for each key that is new or has moved.
        evicted: Keys that no block holds. The map may not know all of them.
    """

    cleared: bool
    cached: dict[BlockHashWithGroupId, int]
    evicted: list[BlockHashWithGroupId]

    def apply_to(self, block_ids: dict[BlockHashWithGroupId, int]) -> None:
        """Change the map."""
        if self.cleared:
            block_ids.clear()
        for key in self.evicted:
            block_ids.pop(key, None)
        block_ids.update(self.cached)


class BlockHashTracker(BlockPoolListener):
    """Collector of the changes to a block pool's prefix cache until they are taken.

    Only the changed keys are noted, each once however often it changed; which
    block holds a key is looked up when the changes are taken. If they are not
    taken and become many more than the blocks of the pool, they are dropped
    for a copy of the cache. A tracker that is detached clears the map for good.

    Attributes:
        has_changes: Whether there is something to take.
        is_detached: Whether a call raised, so that nothing more is noted.
    """

    def __init__(self, block_pool: "BlockPool") -> None:
        self.has_changes = False
        self.is_detached = False
        self._block_pool = block_pool
        self._max_changed = 2 * block_pool.num_gpu_blocks
        self._changed: set[BlockHashWithGroupId] = set()
        self._cleared = False
        block_pool.add_listener(self)

    def on_block_cached(self, key: BlockHashWithGroupId, block_id: int) -> None:
        self._changed.add(key)
        self.has_changes = True

    def on_block_evicted(self, key: BlockHashWithGroupId, block_id: int) -> None:
        self._changed.add(key)
        self.has_changes = True
        # Caching alone cannot go on for ever, so this is looked at only here.
        if len(self._changed) > self._max_changed:
            self.on_cache_reset()

    def on_cache_reset(self) -> None:
        self._changed.clear()
        self.has_changes = self._cleared = True

    def on_detached(self) -> None:
        self._changed = set()
        self.has_changes = self._cleared = self.is_detached = True

    def take(self) -> BlockHashChanges | None:
        """Return the changes since the last call, or None if there are none."""
        if not self.has_changes:
            return None
        block_map = self._block_pool.cached_block_hash_to_block
        changes = BlockHashChanges(cleared=self._cleared, cached={}, evicted=[])
        if self._cleared and not self.is_detached:
            keys = set(block_map.listeners.cache)
        else:
            keys = self._changed
        for key in keys:
            block = block_map.get_one_block(key)
            if block is not None:
                changes.cached[key] = block.block_id
            else:
                changes.evicted.append(key)
        self._changed.clear()
        self.has_changes = self._cleared = False
        return changes
