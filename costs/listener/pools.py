# SPDX-License-Identifier: Apache-2.0
"""Block pools of vLLM, with the listener's patch or without, all in this process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from blockpatch.blocks import parse, render
from lab.serving.installation import installation
from lab.serving.tree import build_tree

PATCHES = ["mooncake_hash_sync", "block_pool_delta_listener"]
# What a step of 8,192 prompt tokens caches.
BLOCKS = 512
BLOCK_SIZE = 16
KEY_BYTES, HASH_BYTES = 36, 32
# Patched or not, and how many trackers listen.
VARIANTS = {
    "unpatched": (False, 0),
    "unpatched again": (False, 0),
    "nobody": (True, 0),
    "one tracker": (True, 1),
    "two trackers": (True, 2),
}
OPERATIONS = ("insert", "pop", "cache_full_blocks", "get_new_blocks")


@contextmanager
def patched_vllm() -> Iterator[None]:
    """Within the block `import vllm` finds a private patched tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        build_tree(tree, installation().package("vllm"), PATCHES, {})
        sys.path.insert(0, str(tree))
        yield


def load_block_pool(patched: bool) -> ModuleType:
    """A new module: no variant runs code that another one has warmed up."""
    from vllm.v1.core import block_pool

    lines, blocks = parse(Path(block_pool.__file__).read_bytes())
    source = render(lines, blocks if patched else [])
    module = ModuleType(block_pool.__name__)
    exec(compile(source, block_pool.__file__, "exec", dont_inherit=True), vars(module))
    return module


def make_pool(variant: str, num_blocks: int) -> tuple[Any, list[Any]]:
    """The variant's block pool, and the trackers that listen to it."""
    from vllm.v1.core.block_pool_listener import BlockHashTracker

    patched, listeners = VARIANTS[variant]
    pool = load_block_pool(patched).BlockPool(num_blocks, True, BLOCK_SIZE)
    return pool, [BlockHashTracker(pool) for _ in range(listeners)]


def fill(pool: Any, num_blocks: int) -> None:
    """Cache `num_blocks` under new keys and free them; the oldest make room."""
    hashes = [os.urandom(HASH_BYTES) for _ in range(num_blocks)]
    blocks = pool.get_new_blocks(num_blocks)
    request = SimpleNamespace(block_hashes=hashes)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)


class TimedPool:
    """A full pool of one variant; its operations are timed in chunks of BLOCKS."""

    def __init__(self, variant: str) -> None:
        self._pool, self._trackers = make_pool(variant, BLOCKS + 1)
        fill(self._pool, BLOCKS)

    def chunk(self) -> list[float]:
        """ns per block of each of OPERATIONS; trackers are emptied in between."""
        keys = [os.urandom(KEY_BYTES) for _ in range(BLOCKS)]
        hashes = [os.urandom(HASH_BYTES) for _ in range(BLOCKS)]
        pool, clock = self._pool, time.perf_counter_ns
        request = SimpleNamespace(block_hashes=hashes)
        block_map, blocks = pool.cached_block_hash_to_block, pool.blocks[1:]
        self._take()

        began = clock()
        for key, block in zip(keys, blocks, strict=True):
            block_map.insert(key, block)
        insert_ns = clock() - began
        self._take()
        began = clock()
        for key, block in zip(keys, blocks, strict=True):
            block_map.pop(key, block.block_id)
        pop_ns = clock() - began
        self._take()
        began = clock()
        blocks = pool.get_new_blocks(BLOCKS)
        evict_ns = clock() - began
        self._take()
        began = clock()
        pool.cache_full_blocks(request, blocks, 0, BLOCKS, BLOCK_SIZE, 0)
        cache_ns = clock() - began
        pool.free_blocks(blocks)
        return [ns / BLOCKS for ns in (insert_ns, pop_ns, cache_ns, evict_ns)]

    def _take(self) -> None:
        for tracker in self._trackers:
            tracker.take()
