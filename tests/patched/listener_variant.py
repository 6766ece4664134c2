# SPDX-License-Identifier: Apache-2.0
"""The patched tree's block pool and its listeners, as they are or with one thing wrong.

A variant is loaded from the text of the patched files, so that many of them live in
one process, and in vLLM's own KVCacheManager.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core import block_pool, block_pool_listener, kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from lab.paths import PATCHES

BLOCK_SIZE = 2
MAX_MODEL_LEN = 64
WINDOW_BLOCKS = 2

Pair = tuple[bytes, int]
Edit = Callable[[str], str]


def load(module: types.ModuleType, edit: Edit | None) -> types.ModuleType:
    """The module again, from its edited text; itself if there is nothing to edit."""
    if edit is None:
        return module
    text = edit(Path(module.__file__).read_text())
    edited = types.ModuleType(module.__name__)
    exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(edited))
    return edited


def load_hash_sync() -> types.ModuleType:
    """The walk, which as a patch fits fewer releases than the listener."""
    path = PATCHES / "mooncake_hash_sync" / "hash_sync.py"
    spec = importlib.util.spec_from_file_location("hash_sync", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Replica(block_pool_listener.BlockPoolListener):
    """The (key, block id) pairs that a pool holds, from what its listeners are told.

    Raises AssertionError if told what cannot be.
    """

    def __init__(self) -> None:
        self.pairs: set[Pair] = set()
        self.heard: list[tuple] = []

    def on_block_cached(self, key: bytes, block_id: int) -> None:
        assert (key, block_id) not in self.pairs, "cached twice"
        self.pairs.add((key, block_id))
        self.heard.append(("cached", key, block_id))

    def on_block_evicted(self, key: bytes, block_id: int) -> None:
        assert (key, block_id) in self.pairs, "evicted but never cached"
        self.pairs.remove((key, block_id))
        self.heard.append(("evicted", key, block_id))

    def on_cache_reset(self) -> None:
        self.pairs.clear()
        self.heard.append(("reset",))


class Variant:
    """Makes pools, managers and trackers of one edited form of the patched code."""

    def __init__(self, pool: Edit | None = None, listener: Edit | None = None) -> None:
        self._pool_class = load(block_pool, pool).BlockPool
        self.tracker = load(block_pool_listener, listener).BlockHashTracker
        self.walk = load_hash_sync().BlockHashWalk

    def pool(self, num_blocks: int) -> BlockPool:
        return self._pool_class(num_blocks, True, BLOCK_SIZE)

    def manager(
        self, num_blocks: int, sliding_window: bool = False, caching: bool = True
    ) -> KVCacheManager:
        """vLLM's manager on a pool of this variant; one or two groups of layers."""
        shape: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        specs = [FullAttentionSpec(**shape)]
        if sliding_window:
            window = WINDOW_BLOCKS * BLOCK_SIZE
            specs.append(SlidingWindowSpec(**shape, sliding_window=window))
        groups = [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)]
        kv_cache_coordinator.BlockPool = self._pool_class
        options = {"hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
        known = signature(KVCacheManager).parameters
        return KVCacheManager(
            KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_MODEL_LEN,
            enable_caching=caching,
            **{name: options[name] for name in options if name in known},
        )

    @staticmethod
    def listen(pool: BlockPool) -> Replica:
        replica = Replica()
        pool.add_listener(replica)
        return replica


def pairs_held(pool: BlockPool) -> set[Pair]:
    """All that the pool's prefix cache holds, duplicates of a key included."""
    return {
        (key, block_id)
        for key, blocks in pool.cached_block_hash_to_block._cache.items()
        for block_id in (blocks if isinstance(blocks, dict) else [blocks.block_id])
    }


def first_blocks(pool: BlockPool) -> dict[bytes, int]:
    """The block that a lookup of each key finds."""
    block_map = pool.cached_block_hash_to_block
    return {key: block_map.get_one_block(key).block_id for key in block_map._cache}
