# SPDX-License-Identifier: Apache-2.0
"""Makes BlockLedgers on vLLM's real block pool, for their tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

BLOCK_SIZE = 16
NUM_BLOCKS = 8


def new_pool(num_blocks: int = NUM_BLOCKS) -> BlockPool:
    return BlockPool(num_blocks, True, BLOCK_SIZE)


def cache(pool: BlockPool, *hashes: bytes) -> list[KVCacheBlock]:
    """New blocks of the pool, in use, one cached under each hash."""
    blocks = pool.get_new_blocks(len(hashes))
    request = SimpleNamespace(block_hashes=list(hashes))
    pool.cache_full_blocks(request, blocks, 0, len(hashes), BLOCK_SIZE, 0)
    return blocks


def ids(*blocks: KVCacheBlock) -> list[int]:
    return [block.block_id for block in blocks]


def a_step(ledger) -> None:
    ledger.begin_step()
    ledger.finish_step()


def written(module: ModuleType, *hashes: bytes, num_blocks: int = NUM_BLOCKS):
    """A pool, its ledger, and blocks cached in a step that has ended."""
    pool = new_pool(num_blocks)
    ledger = module.BlockLedger(pool)
    blocks = cache(pool, *hashes)
    a_step(ledger)
    return pool, ledger, blocks


def block_ids_offered(ledger, *hashes: bytes) -> list[int]:
    return ledger.lookup(list(hashes)).block_ids


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
