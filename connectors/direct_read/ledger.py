# SPDX-License-Identifier: Apache-2.0
"""Ledger of the cached blocks that a peer may read, and of the reads that count.

Nothing is pinned, copied or locked. The engine thread notes each block that is cached
and counts its steps. Another thread looks up and validates; it only reads what the
engine thread writes. Two things make that safe:

- A block is found under its hash before its KV is written: vLLM caches it in
  schedule(), before the forward pass. So it is offered only once the step it was
  cached in has ended.
- A block is evicted, which clears its hash, in schedule() too, before a forward pass
  can overwrite it. So bytes are good if the hash is still there after they arrived.
  The hash must be the identical object, which is new each time a block is cached: an
  equal one may be there because the block was evicted and cached again meanwhile.

README.md has the whole argument and what it takes for granted.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.block_pool_listener import BlockPoolListener
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from connectors.direct_read.protocol import MAX_HASHES, Offer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

# vLLM shows what its own loggers say.
logger = init_logger("vllm.direct_read")

# A reader gives up after Mooncake's own 30 s.
TOKEN_LIFETIME_S = 60.0
# Above these limits the oldest offers are forgotten: their readers never came back.
# Together they bound the memory that offers take: 90 MB if all blocks were evicted.
MAX_TOKENS = 1_024
MAX_HELD_BLOCKS = 1 << 20
# A lookup holds the GIL for so many blocks (some 0.1 ms) before it gives it up.
BLOCKS_IN_A_ROW = 256
# More steps than any engine does.
NEVER = 1 << 62


@dataclass
class Counters:
    """Counts of lookups and blocks."""

    lookups: int = 0
    # Lookups whose offer is shorter than what was asked for, by the reason.
    stopped_absent: int = 0
    stopped_in_flight: int = 0
    blocks_offered: int = 0
    blocks_valid: int = 0
    # Offered, and evicted before the reader was done.
    blocks_evicted: int = 0
    # Offers forgotten before validation, and validations of unknown offers.
    tokens_expired: int = 0
    tokens_unknown: int = 0


class _Held(NamedTuple):
    """State that an offer is validated against."""

    blocks: list[KVCacheBlock]
    keys: list[BlockHashWithGroupId]
    deadline_s: float
    readers: int


class ChangeCounter(BlockPoolListener):
    """Counts of what can change the KV behind a hash, since the pool was made.

    `resets` are those of the prefix cache; a refused one does not count.
    `weight_updates` are calls of the workers that may have changed their weights.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self.resets = 0
        self.weight_updates = 0
        block_pool.add_listener(self)

    def on_block_cached(self, key: BlockHashWithGroupId, block_id: int) -> None:
        pass

    def on_block_evicted(self, key: BlockHashWithGroupId, block_id: int) -> None:
        # The block has lost its hash, or is about to: a ledger has nothing to note.
        pass

    def on_cache_reset(self) -> None:
        self.resets += 1

    def on_detached(self) -> None:
        """Take a count that no peer has, as later resets will not be counted."""
        self.resets = secrets.randbits(62)

    def on_weight_update(self) -> None:
        self.weight_updates += 1

    def changes(self) -> tuple[int, int]:
        return self.resets, self.weight_updates


class BlockLedger(ChangeCounter):
    """Knows which blocks of a pool hold what their hash says, and for how long.

    The engine thread calls `begin_step` at the end of each schedule(), and
    `finish_step` when that step's output has been processed, in the same order; steps
    may overlap. One other thread calls `lookup` and `validate`, at any time.

    Args:
        block_pool: A pool with one KV cache group, while no step is under way.
        readers: How often an offer is validated: the tensor parallel size, as each
            worker reads its own part.
    """

    def __init__(self, block_pool: BlockPool, readers: int = 1) -> None:
        self.counters = Counters()
        self._pool = block_pool
        self._readers = readers
        # By block id: the block's hash and the step it was cached in, in one object,
        # so that a reader sees both or neither.
        self._cached: list[tuple[BlockHashWithGroupId, int] | None] = [
            None
        ] * block_pool.num_gpu_blocks
        self._steps_begun = 0
        self._steps_done = 0
        self._held: dict[int, _Held] = {}
        self._num_held_blocks = 0
        super().__init__(block_pool)
        # A late listener receives the map's keys: equal to its blocks', not identical.
        for block in block_pool.blocks:
            if block.block_hash is not None:
                self.on_block_cached(block.block_hash, block.block_id)

    # Called in the engine thread.

    def on_block_cached(self, key: BlockHashWithGroupId, block_id: int) -> None:
        # The step being scheduled. Async scheduling also caches blocks after a step,
        # which are written already: those are offered late, never early.
        self._cached[block_id] = (key, self._steps_begun + 1)

    def on_weight_update(self) -> None:
        """Offer no block again that was cached before.

        The count comes last: else a lookup could offer such a block with it.
        """
        self._cached = [None] * len(self._cached)
        super().on_weight_update()

    def on_detached(self) -> None:
        """Offer no block again."""
        self._cached = [None] * self._pool.num_gpu_blocks
        super().on_detached()

    def begin_step(self) -> None:
        self._steps_begun += 1

    def finish_step(self) -> None:
        if self._steps_done == self._steps_begun:
            # From here on nobody knows which step has ended.
            self._steps_done = -NEVER
            logger.error("A step ended that never began: no block is offered any more")
        self._steps_done += 1

    # Called in one other thread.

    def lookup(self, hashes: list[bytes]) -> Offer:
        """Offer the leading run of blocks that are cached and written.

        The hashes are block hashes, without a group id; at most MAX_HASHES count.
        """
        self.counters.lookups += 1
        changes = self.changes()
        blocks, keys, stopped = self._leading_run(hashes[:MAX_HASHES])
        if self.changes() != changes:
            # These blocks are of the cache or the weights before.
            blocks, keys, stopped = [], [], "absent"
        self.counters.stopped_absent += stopped == "absent"
        self.counters.stopped_in_flight += stopped == "in_flight"
        if not blocks:
            return Offer(0, [], stopped, *changes)
        self.counters.blocks_offered += len(blocks)
        self._make_room(len(blocks))
        # Not a counter: a token from before a restart must not be valid.
        token = secrets.randbits(62) + 1
        deadline_s = time.monotonic() + TOKEN_LIFETIME_S
        self._held[token] = _Held(blocks, keys, deadline_s, self._readers)
        self._num_held_blocks += len(blocks)
        return Offer(token, [block.block_id for block in blocks], stopped, *changes)

    def validate(self, token: int) -> int:
        """Return how many of the offer's leading blocks are still valid.

        Call it when their bytes have arrived. An unknown token has no valid blocks;
        a token is forgotten after its last reader or its deadline.
        """
        self._make_room(0)
        held = self._held.get(token)
        if held is None:
            self.counters.tokens_unknown += 1
            return 0
        if held.readers > 1:
            self._held[token] = held._replace(readers=held.readers - 1)
        else:
            self._forget(token)
        num_valid = 0
        for block, key in zip(held.blocks, held.keys, strict=True):
            if block.block_hash is not key:
                break
            num_valid += 1
        self.counters.blocks_valid += num_valid
        self.counters.blocks_evicted += len(held.blocks) - num_valid
        return num_valid

    def _leading_run(
        self, hashes: list[bytes]
    ) -> tuple[list[KVCacheBlock], list[BlockHashWithGroupId], str]:
        """Blocks that can be read, their hashes, and why there are no more."""
        block_map = self._pool.cached_block_hash_to_block
        blocks: list[KVCacheBlock] = []
        keys: list[BlockHashWithGroupId] = []
        for index, block_hash in enumerate(hashes, start=1):
            if index % BLOCKS_IN_A_ROW == 0:
                time.sleep(0)
            wanted = make_block_hash_with_group_id(block_hash, 0)
            try:
                block = block_map.get_one_block(wanted)
            except (RuntimeError, StopIteration):
                # The blocks of this hash changed while they were looked at.
                return blocks, keys, "absent"
            if block is None:
                return blocks, keys, "absent"
            cached = self._cached[block.block_id]
            if cached is None:
                return blocks, keys, "absent"
            key, step = cached
            # Not equal to what is wanted if the block has changed hands since it was
            # found; not the block's own if it is changing hands now.
            if key != wanted or key is not block.block_hash:
                return blocks, keys, "absent"
            if step > self._steps_done:
                return blocks, keys, "in_flight"
            blocks.append(block)
            keys.append(key)
        return blocks, keys, ""

    def _make_room(self, num_blocks: int) -> None:
        """Forget offers past their deadline, and the oldest above the limits."""
        while self._held:
            # In the order they were made.
            token, oldest = next(iter(self._held.items()))
            if (
                oldest.deadline_s > time.monotonic()
                and (not num_blocks or len(self._held) < MAX_TOKENS)
                and self._num_held_blocks + num_blocks <= MAX_HELD_BLOCKS
            ):
                return
            self._forget(token)
            self.counters.tokens_expired += 1

    def _forget(self, token: int) -> None:
        self._num_held_blocks -= len(self._held.pop(token).blocks)
